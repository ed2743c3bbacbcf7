-- audit_flow_missing: Every member, and every row about a flow, belongs to a flow that exists.
create or replace function flowfabric.audit_flow_missing(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with d as (
        select x.* from flowfabric.edge x where (x.partition, x.flow_id) between (p_low, p_from) and (p_high, p_to)
    ), g as (
        select x.* from flowfabric.edge_group x where (x.partition, x.flow_id) between (p_low, p_from) and (p_high, p_to)
    ), c as (
        select x.* from flowfabric.cancel_member x where (x.partition, x.id) between (p_low, p_from) and (p_high, p_to)
    ), owed as (
        select x.* from flowfabric.pending_cascade x where x.partition between p_low and p_high
    )
    select 'flow_missing', e.partition, e.id, e.flow_id::text from flowfabric.execution e
    where e.flow_id is not null and (e.partition, e.id) between (p_low, p_from) and (p_high, p_to)
      and not exists (select from flowfabric.flow x where x.partition = e.partition and x.flow_id = e.flow_id)
    union all
    select 'flow_missing', o.partition, o.id, o.what
    from (select d.partition, d.edge_id as id, d.flow_id, 'edge' as what from d
          union all select g.partition, g.downstream, g.flow_id, 'edge_group' from g
          union all select c.partition, c.id, c.flow_id, 'cancel_member' from c
          union all select o.partition, o.id, o.flow_id, 'pending_cascade' from owed o
          union all select x.partition, x.downstream, x.flow_id, 'sibling_cancel' from flowfabric.sibling_cancel x
          where (x.partition, x.flow_id) between (p_low, p_from) and (p_high, p_to)
          union all select x.partition, x.flow_id, x.flow_id, 'cancel_backlog' from flowfabric.cancel_backlog x
          where (x.partition, x.flow_id) between (p_low, p_from) and (p_high, p_to)
          union all select x.partition, x.flow_id, x.flow_id, 'flow_summary' from flowfabric.flow_summary x
          where (x.partition, x.flow_id) between (p_low, p_from) and (p_high, p_to)) o
    where not exists (select from flowfabric.flow x where x.partition = o.partition and x.flow_id = o.flow_id)
$$;
