-- audit_group_counts: A group counts its applied edges, by outcome.
create or replace function flowfabric.audit_group_counts(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with g as (
        select x.* from flowfabric.edge_group x where (x.partition, x.flow_id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'group_counts', g.partition, g.downstream, concat_ws(' ', g.n, g.succeeded, g.failed, g.skipped) from g
    where (g.n, g.succeeded, g.failed, g.skipped) <> (
        select count(*), count(*) filter (where x.outcome = 'success'),
               count(*) filter (where x.outcome in ('failed', 'cancelled', 'expired')),
               count(*) filter (where x.outcome = 'skipped')
        from flowfabric.edge x where x.partition = g.partition and x.downstream = g.downstream
          and x.flow_id is not distinct from g.flow_id and x.applied_at is not null)
$$;
