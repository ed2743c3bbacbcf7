-- server_time_ms: the clock, in milliseconds since the epoch.
--
-- Roles    read, submit, work, operate
create or replace function flowfabric.server_time_ms() returns bigint
language sql volatile security definer as $$
    select floor(extract(epoch from flowfabric.now()) * 1000)::bigint
$$;
