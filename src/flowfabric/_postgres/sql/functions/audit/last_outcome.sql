-- audit_last_outcome: The latest completion event has the final state.
create or replace function flowfabric.audit_last_outcome(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with v as materialized (
        select x.partition, x.id, (array_agg(x.outcome order by x.seq desc))[1] as outcome
        from flowfabric.present_events(p_low, p_high) x where x.outcome is not null
        group by x.partition, x.id
    ), e as (
        select x.* from flowfabric.execution x where (x.partition, x.id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'last_outcome', e.partition, e.id, e.state
    from e left join v on v.partition = e.partition and v.id = e.id
    where e.completed_at is not null
      and v.outcome is distinct from case e.state when 'completed' then 'success' else e.state end
$$;
