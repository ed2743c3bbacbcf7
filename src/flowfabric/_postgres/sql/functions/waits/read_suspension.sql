-- read_suspension: the newest suspension of an execution, open or closed.
create or replace function flowfabric.read_suspension(p_partition integer, p_id uuid) returns setof flowfabric.suspension
language sql stable security definer as $$
    select s.* from flowfabric.suspension s where s.partition = p_partition and s.id = p_id
    order by s.number desc limit 1
$$;
