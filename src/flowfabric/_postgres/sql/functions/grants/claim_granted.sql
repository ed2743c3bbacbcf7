-- claim_granted: consume a claim grant and start the attempt, or continue it
--
-- Called by the worker that has the grant.
-- Takes    p_is_resumed: it continues an interrupted attempt (claim_resumed_execution; else claim_execution).
-- Locks    the execution, then its ready row.
-- Returns  the lease as a row with code ok, or a row with the refusal only.
-- Roles    work, operate
create or replace function flowfabric.claim_granted(
    p_is_resumed boolean, p_partition integer, p_id uuid, p_lane text, p_worker text, p_instance text, p_lease uuid,
    p_attempt uuid, p_ttl_ms bigint, p_grant_key text, p_policy text, p_timeout_ms bigint, p_deadline_at timestamptz)
returns setof flowfabric.granted
language sql volatile security definer as $$
    select * from flowfabric.claim_one(
        case when p_is_resumed then 'resumed' else 'fresh' end, p_partition, p_id, p_lane, p_worker, p_instance, p_lease,
        p_attempt, p_ttl_ms, p_grant_key, p_policy, p_timeout_ms, p_deadline_at)
$$;
