-- open_suspension: the open suspension of an execution; all null if it has none.
--
-- If one is open, it is the newest. Asked for by closed_at, an index in the order of time might be read instead: all open
-- suspensions of the partition.
create or replace function flowfabric.open_suspension(p_partition integer, p_id uuid) returns flowfabric.suspension
language plpgsql stable as $$
declare
    s flowfabric.suspension;
begin
    select x.* into s from (
        select n.* from flowfabric.suspension n where n.partition = p_partition and n.id = p_id
        order by n.number desc limit 1) x
    where x.closed_at is null;
    return s;
end;
$$;
