-- is_alive: whether a registered worker counts as there at this time; otherwise it is absent, swept or not.
create or replace function flowfabric.is_alive(r flowfabric.registration, p_now timestamptz) returns boolean
language sql immutable as $$ select r.heartbeat_at + r.liveness_ttl > p_now $$;
