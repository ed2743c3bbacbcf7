-- audit_grant_state: A live grant is for an execution that can be claimed, or reclaimed.
create or replace function flowfabric.audit_grant_state(
    p_low integer, p_high integer, p_from uuid, p_to uuid, p_now timestamptz) returns setof flowfabric.violation
language sql stable as $$
    select 'grant_state', g.partition, g.id, g.kind from flowfabric.claim_grant g
    left join flowfabric.execution x on x.partition = g.partition and x.id = g.id
    where (g.partition, g.id) between (p_low, p_from) and (p_high, p_to) and g.expires_at > p_now
      and not coalesce(case g.kind
          when 'claim' then x.state in ('waiting', 'resumable') and x.blocking_reason = 'waiting_for_worker'
          else x.state = 'active' and x.lease_lost is not null end, false)
$$;
