-- promote_blocked: release an execution that is blocked although its group is satisfied. A repair.
--
-- Locks    the group, then the execution.
-- Returns  ok, not_found, terminal, not_runnable, not_blocked_by_deps, deps_not_satisfied.
-- Roles    operate
create or replace function flowfabric.promote_blocked(p_partition integer, p_id uuid) returns text
language plpgsql security definer as $$
declare
    e flowfabric.execution;
    v_state text;
begin
    perform flowfabric.require_read_committed();
    select x.* into e from flowfabric.execution x where x.partition = p_partition and x.id = p_id;
    if e.flow_id is not null then
        perform flowfabric.lock_group(p_partition, e.flow_id, p_id);
    end if;
    select x.* into e from flowfabric.execution x where x.partition = p_partition and x.id = p_id for no key update;
    if e.id is null then
        return 'not_found';
    elsif e.completed_at is not null then
        return 'terminal';
    elsif e.state in ('active', 'suspended') then
        return 'not_runnable';
    elsif e.state <> 'waiting_children' or e.is_parked then
        return 'not_blocked_by_deps';
    end if;
    select g.state into v_state from flowfabric.edge_group g
    where g.partition = p_partition and g.flow_id = e.flow_id and g.downstream = p_id and g.n > 0;
    if v_state <> 'satisfied' then
        return 'deps_not_satisfied';
    end if;
    perform flowfabric.release_members(array[p_partition], array[p_id], flowfabric.now());
    return 'ok';
end;
$$;
