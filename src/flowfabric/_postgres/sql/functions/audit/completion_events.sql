-- audit_completion_events: There is one completion event per end; each replay undid one.
create or replace function flowfabric.audit_completion_events(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with v as materialized (
        select x.* from flowfabric.event x where x.partition between p_low and p_high
    ), e as (
        select x.* from flowfabric.execution x where (x.partition, x.id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'completion_events', e.partition, e.id,
           (select string_agg(v.outcome, ',' order by v.seq) from v where v.partition = e.partition and v.id = e.id)
    from e where (select count(*) from v where v.partition = e.partition and v.id = e.id and v.outcome is not null)
                 <> e.replays + case when e.completed_at is null then 0 else 1 end
$$;
