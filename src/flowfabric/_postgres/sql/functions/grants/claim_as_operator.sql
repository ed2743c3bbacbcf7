-- claim_as_operator: claim one execution without a grant, ignoring its requirements
--
-- Called by operators (issue_grant_and_claim). It leaves no grant.
-- Locks    the execution, then its ready row.
-- Returns  the lease as a row with code ok, or a row with the refusal only.
-- Roles    operate
create or replace function flowfabric.claim_as_operator(
    p_partition integer, p_id uuid, p_lane text, p_worker text, p_instance text, p_ttl_ms bigint)
returns setof flowfabric.granted
language sql volatile security definer as $$
    select * from flowfabric.claim_one(
        'operator', p_partition, p_id, p_lane, p_worker, p_instance, null, null, p_ttl_ms, null, null, null, null)
$$;
