-- is_alive: whether a registered worker counts as there at this time; otherwise it is absent, swept or not.
--
-- Stable, as adding an interval is: only then the planner inlines it.
create or replace function flowfabric.is_alive(r flowfabric.registration, p_now timestamptz) returns boolean
language sql stable as $$ select r.heartbeat_at + r.liveness_ttl > p_now $$;
