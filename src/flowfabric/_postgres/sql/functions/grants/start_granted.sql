-- start_granted: give a lease on one execution that is locked, and take it out of the queue
--
-- Called by claim_one and reclaim, under their locks, when nothing refuses the claim.
-- Takes    p_again: it is not at its first attempt. p_now: the time under the locks.
-- Locks    its ready row.
-- Returns  the lease with code ok.
create or replace function flowfabric.start_granted(
    p_partition integer, p_id uuid, p_worker text, p_instance text, p_lease uuid, p_attempt uuid, p_ttl_ms bigint,
    p_timeout_ms bigint, p_deadline_at timestamptz, p_policy text, p_again boolean, p_now timestamptz)
returns setof flowfabric.granted
language plpgsql as $$
begin
    perform flowfabric.drop_ready(array[p_partition], array[p_id]);
    return query
    select 'ok'::text, null::text, s.* from flowfabric.start_attempts(
        (select array[x.ctid] from flowfabric.execution x where x.partition = p_partition and x.id = p_id),
        array[p_lease], array[p_attempt], flowfabric.number_worker(p_worker, p_instance, p_now), p_ttl_ms,
        p_timeout_ms, p_deadline_at, p_policy::jsonb, null, p_again, null, null, p_now) s;
end;
$$;
