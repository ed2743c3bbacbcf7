-- audit_facts_known: Pending attempts, lost leases and priorities have known words and numbers.
create or replace function flowfabric.audit_facts_known(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with e as (
        select x.* from flowfabric.execution x where (x.partition, x.id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'facts_known', e.partition, e.id, concat_ws(' ', e.pending, e.lease_lost, e.priority) from e
    where e.pending not in ('first', 'retry', 'replay', 'interrupted') or e.lease_lost not in ('expired', 'revoked')
       or e.priority not between 0 and 9000
$$;
