-- wait_children_as_operator: active -> waiting_children, with any lease holder; if its dependencies are satisfied,
-- active -> waiting
--
-- Called by operators. The same attempt continues.
-- Locks    the execution's group; the execution.
-- Returns  one verdict: ok, or the reason it was refused.
-- Roles    operate
create or replace function flowfabric.wait_children_as_operator(p_partition integer, p_id uuid)
returns setof flowfabric.verdict
language plpgsql security definer as $$
declare
    h flowfabric.held;
begin
    perform flowfabric.require_read_committed();
    -- In the order of wait_children, which takes both locks again.
    perform 1 from flowfabric.execution e
    join flowfabric.edge_group g on g.partition = e.partition and g.flow_id = e.flow_id and g.downstream = e.id
    where e.partition = p_partition and e.id = p_id and g.n > 0 for update of g;
    h := flowfabric.hold_as_operator(p_partition, p_id);
    if (h.refusal).code is not null then
        return next h.refusal;
        return;
    end if;
    return query select * from flowfabric.wait_children(
        p_partition, p_id, h.lease_id, h.epoch, h.attempt_id, h.attempt_index);
end;
$$;
