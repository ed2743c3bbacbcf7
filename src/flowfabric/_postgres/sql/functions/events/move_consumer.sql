-- move_consumer: the transaction that acted on events moves the position of the consumer past them
--
-- Called with the lock of take_consumer. An operator moves it with set_consumer.
-- Returns  whether this is the transaction that took it: a function may have ended that one, and begun another.
-- Roles    work, operate
create or replace function flowfabric.move_consumer(
    p_name text, p_instance uuid, p_position bigint, p_epoch bigint, p_handled integer) returns boolean
language plpgsql security definer as $$
begin
    perform flowfabric.require_read_committed();
    update flowfabric.consumer x
    set position = p_position, epoch = p_epoch, handled = x.handled + p_handled, moved_at = flowfabric.now(), failures = 0,
        failure = null
    where x.name = p_name and x.instance = p_instance and x.xmin = pg_current_xact_id()::xid;
    return found;
end;
$$;
