-- reconcile_siblings: repair an entry that a crashed dispatcher left behind
--
-- Returns  sremmed_stale (no cancel is needed), completed_drain (all siblings have ended) or no_op (the dispatcher's
-- work).
-- Roles    work, operate
create or replace function flowfabric.reconcile_siblings(p_partition integer, p_flow uuid, p_downstream uuid) returns text
language plpgsql security definer as $$
declare
    s flowfabric.sibling_cancel;
    g flowfabric.edge_group;
begin
    perform flowfabric.require_read_committed();
    select x.* into s from flowfabric.sibling_cancel x
    where x.partition = p_partition and x.flow_id = p_flow and x.downstream = p_downstream for update skip locked;
    if s.flow_id is null then
        return 'no_op';
    end if;
    select x.* into g from flowfabric.edge_group x
    where x.partition = p_partition and x.flow_id = p_flow and x.downstream = p_downstream for update skip locked;
    if g.flow_id is null and exists (select from flowfabric.edge_group x where x.partition = p_partition
            and x.flow_id = p_flow and x.downstream = p_downstream) then
        return 'no_op';
    elsif g.flow_id is not null and g.cancel_siblings_pending and exists (
            select from unnest(s.siblings) u (id)
            cross join lateral (select from flowfabric.execution x
                                where x.partition = p_partition and x.id = u.id and x.completed_at is null limit 1) e) then
        return 'no_op';
    end if;
    delete from flowfabric.sibling_cancel x
    where x.partition = p_partition and x.flow_id = p_flow and x.downstream = p_downstream;
    update flowfabric.edge_group x set cancel_siblings_pending = false
    where x.partition = p_partition and x.flow_id = p_flow and x.downstream = p_downstream and x.cancel_siblings_pending;
    return case when g.flow_id is null or not g.cancel_siblings_pending then 'sremmed_stale' else 'completed_drain' end;
end;
$$;
