-- block_members: runnable -> waiting_children, because a dependency is not satisfied.
--
-- Called under the locks of the executions. Active, suspended and ended ones are left alone. A delay is kept, and so is
-- an earlier blocking reason; a parked execution continues when it is released, and parks again if needed.
create or replace function flowfabric.block_members(
    p_partition integer[], p_id uuid[], p_detail text[], p_now timestamptz) returns void
language plpgsql as $$
begin
    perform flowfabric.drop_ready(p_partition, p_id);
    perform flowfabric.drop_blocked(p_partition, p_id);
    with blocked as (
        update flowfabric.execution e
        set state = 'waiting_children', blocking_reason = 'waiting_for_children', blocking_detail = u.detail,
            held_back = case when e.blocking_reason in ('paused_by_operator', 'paused_by_policy', 'waiting_for_budget',
                                                        'waiting_for_quota') then e.blocking_reason else e.held_back end,
            is_parked = false, stop_route = null,
            delay_until = case when e.stop_route is not null or e.is_parked and exists (
                select from flowfabric.waiter w where w.partition = e.partition and w.id = e.id) then null
                else e.delay_until end,
            transitioned_at = p_now, mutated_at = null
        from unnest(p_partition, p_id, p_detail) as u (partition, id, detail)
        where e.partition = u.partition and e.id = u.id
          and e.state in ('waiting', 'delayed', 'rate_limited', 'resumable', 'waiting_children')
        returning e.partition, e.flow_id
    )
    insert into flowfabric.flow_touched select distinct b.partition, b.flow_id from blocked b where b.flow_id is not null;
    perform flowfabric.forget_waits(p_partition, p_id);
end;
$$;
