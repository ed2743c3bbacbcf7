-- freeze_members: runnable -> waiting, held back because the flow was cancelled. Called under the locks of the executions.
create or replace function flowfabric.freeze_members(p_partition integer[], p_id uuid[], p_now timestamptz) returns void
language plpgsql as $$
begin
    perform flowfabric.drop_blocked(p_partition, p_id);
    update flowfabric.execution e
    set state = 'waiting', blocking_reason = 'paused_by_flow_cancel', blocking_detail = 'flow cancelled', delay_until = null,
        held_back = null, is_parked = false, stop_route = null,
        transitioned_at = p_now, mutated_at = null
    from unnest(p_partition, p_id) as u (partition, id)
    where e.partition = u.partition and e.id = u.id
      and e.state in ('waiting', 'delayed', 'rate_limited', 'resumable', 'waiting_children');
    perform flowfabric.forget_waits(p_partition, p_id);
end;
$$;
