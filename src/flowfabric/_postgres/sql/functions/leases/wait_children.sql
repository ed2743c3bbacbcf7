-- wait_children: active -> waiting_children, until its dependencies are satisfied; if they are, active -> waiting
--
-- Called by the lease holder, which gives the lease back. The same attempt continues.
-- Locks    the execution's group; the execution.
-- Returns  one verdict: ok, or the reason it was refused.
-- Roles    work, operate
create or replace function flowfabric.wait_children(
    p_partition integer, p_id uuid, p_lease uuid, p_epoch bigint, p_attempt uuid, p_index integer)
returns setof flowfabric.verdict
language plpgsql security definer as $$
declare
    v_held flowfabric.verdict;
    v_is_open boolean;
begin
    perform flowfabric.require_read_committed();
    select g.state <> 'satisfied' into v_is_open from flowfabric.execution e
    join flowfabric.edge_group g on g.partition = e.partition and g.flow_id = e.flow_id and g.downstream = e.id
    where e.partition = p_partition and e.id = p_id and g.n > 0 for update of g;
    v_held := flowfabric.hold_one(p_partition, p_id, p_lease, p_epoch, p_attempt, p_index);
    if v_held.code is not null then
        return next v_held;
        return;
    end if;
    return next flowfabric.give_back(
        p_partition, p_id, case when v_is_open then 'waiting_children' else 'waiting' end, false, null,
        case when v_is_open then 'waiting for child executions to complete' end, 'waiting_children', v_held.at);
end;
$$;
