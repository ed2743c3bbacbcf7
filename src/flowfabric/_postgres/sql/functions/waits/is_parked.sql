-- is_parked: waits for a time or for the end of another execution, with its attempt to be continued.
create or replace function flowfabric.is_parked(e flowfabric.execution) returns boolean
language sql immutable as $$
    select e.state = 'delayed' and e.pending = 'interrupted' and e.blocking_reason = 'waiting_for_delay'
$$;
