-- set_consumer: an operator moves a consumer to another position of the log
--
-- A position after which events are missing is refused (consumer_position).
-- Takes    p_position: null: the end of the log.
-- Locks    the consumer, and waits for it: a running function ends first.
-- Returns  whether it exists.
-- Roles    operate
create or replace function flowfabric.set_consumer(p_name text, p_position bigint, p_epoch bigint) returns boolean
language plpgsql security definer as $$
declare
    v_position bigint;
    v_epoch bigint;
begin
    perform flowfabric.require_read_committed();
    select p.at, p.epoch into v_position, v_epoch from flowfabric.consumer_position(p_position, p_epoch) p;
    update flowfabric.consumer x
    set position = v_position, epoch = v_epoch, moved_at = flowfabric.now(), failures = 0, failure = null
    where x.name = p_name;
    return found;
end;
$$;
