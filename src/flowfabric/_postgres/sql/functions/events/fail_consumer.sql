-- fail_consumer: note that the function of a consumer failed, and that its transaction was rolled back
--
-- Returns  whether it was noted: not if another process works meanwhile.
-- Roles    work, operate
create or replace function flowfabric.fail_consumer(p_name text, p_instance uuid, p_failure text) returns boolean
language plpgsql security definer as $$
begin
    perform flowfabric.require_read_committed();
    update flowfabric.consumer x set failures = x.failures + 1, failure = left(p_failure, 1000)
    where x.name = p_name
      and (x.instance = p_instance or x.instance is null or x.until <= (select clock_timestamp()));
    return found;
end;
$$;
