-- lock_signalled: lock the execution that a signal is for, and read what the delivery needs; all null if there is none.
create or replace function flowfabric.lock_signalled(p_partition integer, p_id uuid) returns flowfabric.signalled
language plpgsql as $$
declare
    e flowfabric.signalled;
    v_is_ready boolean;
    v_ready_route integer;
begin
    select x.partition, x.id, x.route, x.state, x.completed_at, x.flow_id, x.namespace, x.tags, x.is_parked,
           (x.policy ->> 'max_signals_per_execution')::bigint,
           x.state in ('waiting', 'resumable') or x.lease_lost is not null, flowfabric.ready_route(x)
    into e.partition, e.id, e.route, e.state, e.completed_at, e.flow_id, e.namespace, e.tags, e.is_parked, e.max_signals,
         v_is_ready, v_ready_route
    from flowfabric.execution x where x.partition = p_partition and x.id = p_id for no key update;
    if v_is_ready then
        perform flowfabric.wake_route(v_ready_route, 1);   -- a concurrent claim skipped it
    end if;
    return e;
end;
$$;
