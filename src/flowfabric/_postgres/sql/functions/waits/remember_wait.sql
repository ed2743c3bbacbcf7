-- remember_wait: record the outcome of a task's wait in its step, which the handler reads first.
--
-- Takes    the waitpoints of the wait, or of several that ended together, and why they closed. A wait that ends with its execution is not remembered.
create or replace function flowfabric.remember_wait(
    p_partition integer, p_id uuid, p_waitpoints uuid[], p_reason text, p_satisfiers uuid[]) returns void
language plpgsql as $$
declare
    v_outcome text := case p_reason when 'resumed' then 'resumed' when 'timed_out_auto_resume' then 'timed_out'
                                    when 'operator_resumed' then 'operator_resumed' when 'given_up' then 'given_up' end;
    v_result bytea;
begin
    if v_outcome = 'resumed' then
        select convert_to(jsonb_agg(jsonb_build_object(
                   'signal_id', g.signal_id, 'name', g.signal_name, 'key', g.waitpoint_key, 'category', g.signal_category,
                   'source_type', g.source_type, 'source_identity', g.source_identity, 'correlation_id', g.correlation_id,
                   'accepted_at', to_char(g.accepted_at at time zone 'utc', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
                   'payload', translate(encode(g.payload, 'base64'), E'\n', ''), 'payload_encoding', g.payload_encoding)
                   order by g.ordinal)::text, 'UTF8')
        into v_result
        from unnest(p_satisfiers) as u (signal_id)
        cross join lateral (select x.* from flowfabric.signal x
                            where x.signal_id = u.signal_id and (x.partition, x.id) is not distinct from (p_partition, p_id)
                            offset 0) g;
    end if;
    update flowfabric.step s set result = v_result, outcome = v_outcome, recorded_at = flowfabric.now(),
                                 is_unread = v_outcome = 'resumed'
    from flowfabric.execution e
    where v_outcome is not null and e.partition = p_partition and e.id = p_id and s.partition = e.partition and s.id = e.id
      and s.generation = e.generation and s.kind = 'wait' and s.waitpoint_ids <@ p_waitpoints and s.outcome is null;
end;
$$;
