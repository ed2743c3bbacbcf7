-- ready_route: the route of an execution's ready row: its own unless not every worker of its kind may run it.
create or replace function flowfabric.ready_route(e flowfabric.execution) returns integer
language sql immutable as $$ select coalesce(e.stop_route, e.pinned, e.route) $$;
