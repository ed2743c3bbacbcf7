-- refuse_holders: why the other items of a holder's call were refused, in the order of checks that callers rely on.
--
-- Called under the locks of lock_holders. It marks an expired lease, and the mark stays.
-- Returns  one verdict per refused item; a repeated terminal call gets 'replayed' (p_replays names the call).
create or replace function flowfabric.refuse_holders(
    p_partition integer[], p_id uuid[], p_lease uuid[], p_epoch bigint[], p_attempt uuid[], p_index integer[],
    p_replays text, p_ok integer[], p_now timestamptz)
returns setof flowfabric.verdict
language plpgsql as $$
declare
    v_ord integer;
    e flowfabric.execution;
    a record;
    v flowfabric.verdict;
begin
    for v_ord in select o from generate_subscripts(p_id, 1) o where o <> all (p_ok) loop
        v := row(v_ord, null, null, null, null, null, null)::flowfabric.verdict;
        select x.* into e from flowfabric.execution x where x.partition = p_partition[v_ord] and x.id = p_id[v_ord];
        v.state := e.state; v.lease_epoch := e.epoch;
        v.attempt_id := case when e.pending = 'retry' then null else e.attempt_id end;
        if num_nulls(p_lease[v_ord], p_epoch[v_ord], p_attempt[v_ord]) between 1 and 2 then
            v.code := 'invalid_input'; v.detail := 'partial_fence_triple';
        elsif e.id is null then
            v.code := 'not_found';
        elsif p_lease[v_ord] is null then
            v.code := 'invalid_input'; v.detail := 'fence_required';
        else
            if p_replays is not null then
                select h.disposition, h.retry_at into a
                from flowfabric.attempts_of(e.partition, e.id) h
                where h.attempt_id = p_attempt[v_ord] and h.lease_id = p_lease[v_ord] and h.lease_epoch = p_epoch[v_ord]
                  and (p_index[v_ord] is null or h.attempt_index = p_index[v_ord]);
                if found and (a.disposition = p_replays
                              or (p_replays = 'failed' and a.disposition in ('retry_scheduled', 'terminal_failed'))) then
                    v.code := 'replayed'; v.detail := a.disposition; v.at := a.retry_at;
                    return next v;
                    continue;
                end if;
            end if;
            if e.state <> 'active' then
                v.code := 'execution_not_active';
            elsif e.lease_lost = 'revoked' then
                v.code := 'lease_revoked';
            elsif e.lease_lost = 'expired' or e.lease_expires_at <= p_now then
                if e.lease_lost is null then
                    perform flowfabric.mark_expired(array[e.partition], array[e.id], p_now);
                end if;
                v.code := 'lease_expired';
            else
                v.code := 'stale_lease';
            end if;
        end if;
        return next v;
    end loop;
end;
$$;
