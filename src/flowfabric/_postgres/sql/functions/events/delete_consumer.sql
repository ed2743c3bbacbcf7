-- delete_consumer: forget a consumer and its position
--
-- Locks    the consumer, and waits for it.
-- Returns  whether it existed.
-- Roles    operate
create or replace function flowfabric.delete_consumer(p_name text) returns boolean
language plpgsql security definer as $$
begin
    perform flowfabric.require_read_committed();
    delete from flowfabric.consumer x where x.name = p_name;
    return found;
end;
$$;
