-- audit_last_outcome: The latest completion event has the final state.
create or replace function flowfabric.audit_last_outcome(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with v as materialized (
        select x.* from flowfabric.event x where x.partition between p_low and p_high
    ), e as (
        select x.* from flowfabric.execution x where (x.partition, x.id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'last_outcome', e.partition, e.id, e.state from e
    where e.completed_at is not null
      and (select v.outcome from v where v.partition = e.partition and v.id = e.id and v.outcome is not null
           order by v.seq desc limit 1) is distinct from case e.state when 'completed' then 'success' else e.state end
$$;
