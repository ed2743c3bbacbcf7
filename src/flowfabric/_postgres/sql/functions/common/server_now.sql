-- server_now: the clock, for callers without rights on the tables behind it.
--
-- Roles    read, submit, work, operate
create or replace function flowfabric.server_now() returns timestamptz
language sql volatile security definer as $$ select flowfabric.now() $$;
