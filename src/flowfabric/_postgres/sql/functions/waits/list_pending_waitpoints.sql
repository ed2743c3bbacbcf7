-- Reads

-- list_pending_waitpoints: the pending and active waitpoints of an execution, by id, without their tokens
--
-- Returns  one row more than the page if there is more; a row without a waitpoint for an unknown execution.
-- Roles    read, submit, work, operate
create or replace function flowfabric.list_pending_waitpoints(p_partition integer, p_id uuid, p_after uuid, p_limit integer)
returns table (waitpoint_id uuid, waitpoint_key text, state text, required_signal_names text[], created_at timestamptz,
               activated_at timestamptz, expires_at timestamptz, token_kid text, token_fingerprint text)
language plpgsql stable security definer as $$
#variable_conflict use_column
begin
    if not exists (select from flowfabric.execution e where e.partition = p_partition and e.id = p_id) then
        return next;
        return;
    end if;
    return query
    select w.waitpoint_id, w.waitpoint_key, w.state, w.required_signal_names, w.created_at, w.activated_at,
           nullif(w.expires_at, flowfabric.far_date()), w.token_kid,
           left(encode(sha256(convert_to(
               flowfabric.token_digest(w.token_kid, w.partition, w.id, w.waitpoint_id), 'UTF8')), 'hex'), 16)
    from flowfabric.waitpoint w
    where w.partition = p_partition and w.id = p_id and (p_after is null or w.waitpoint_id > p_after)
      and (w.state = 'active' or (w.state = 'pending' and w.expires_at > flowfabric.now()))
    order by w.waitpoint_id limit p_limit + 1;
end;
$$;
