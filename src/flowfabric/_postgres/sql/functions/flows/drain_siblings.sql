-- drain_siblings: drop the sibling cancels of a group
--
-- Returns  drained, already_drained, or drained_sans_group if the group itself is deleted; siblings_alive, and nothing
--          changes, while one of them has not ended: it would be forgotten.
-- Roles    operate
create or replace function flowfabric.drain_siblings(p_partition integer, p_flow uuid, p_downstream uuid) returns text
language plpgsql security definer as $$
declare
    v_entry boolean;
    v_pending boolean;
begin
    perform flowfabric.require_read_committed();
    -- The group first, as adding to the entry does.
    select g.cancel_siblings_pending into v_pending from flowfabric.edge_group g
    where g.partition = p_partition and g.flow_id = p_flow and g.downstream = p_downstream for update;
    if exists (select from flowfabric.sibling_cancel x cross join lateral unnest(x.siblings) u (id)
               cross join lateral (select from flowfabric.execution y
                                   where y.partition = p_partition and y.id = u.id and y.completed_at is null limit 1) e
               where x.partition = p_partition and x.flow_id = p_flow and x.downstream = p_downstream) then
        return 'siblings_alive';
    end if;
    delete from flowfabric.sibling_cancel x
    where x.partition = p_partition and x.flow_id = p_flow and x.downstream = p_downstream;
    v_entry := found;
    if v_pending is null then
        return 'drained_sans_group';
    end if;
    update flowfabric.edge_group g set cancel_siblings_pending = false
    where g.partition = p_partition and g.flow_id = p_flow and g.downstream = p_downstream and g.cancel_siblings_pending;
    return case when v_entry or v_pending then 'drained' else 'already_drained' end;
end;
$$;
