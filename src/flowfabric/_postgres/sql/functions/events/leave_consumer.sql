-- leave_consumer: this process stops working for a consumer; another process may take over at once
--
-- Roles    work, operate
create or replace function flowfabric.leave_consumer(p_name text, p_instance uuid) returns boolean
language plpgsql security definer as $$
begin
    perform flowfabric.require_read_committed();
    update flowfabric.consumer x set instance = null, until = null, host = null, pid = null
    where x.name = p_name and x.instance = p_instance;
    return found;
end;
$$;
