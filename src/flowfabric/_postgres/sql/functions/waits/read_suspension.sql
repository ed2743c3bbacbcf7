-- read_suspension: the newest suspension of an execution, open or closed; without the lease it began with.
--
-- Roles    read, submit, work, operate
create or replace function flowfabric.read_suspension(p_partition integer, p_id uuid) returns setof flowfabric.suspension
language plpgsql stable security definer as $$
declare
    v_row flowfabric.suspension;
begin
    select s.* into v_row from flowfabric.suspension s where s.partition = p_partition and s.id = p_id
    order by s.number desc limit 1;
    if found then
        v_row.lease_id := null;   -- the right to report; see may_operate
        return next v_row;
    end if;
end;
$$;
