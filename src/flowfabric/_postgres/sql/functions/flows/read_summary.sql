-- read_summary: the counted members of a flow.
--
-- Roles    read, submit, work, operate
create or replace function flowfabric.read_summary(p_partition integer, p_flow uuid) returns setof flowfabric.flow_summary
language sql stable security definer as $$
    select s.* from flowfabric.flow_summary s where s.partition = p_partition and s.flow_id = p_flow
$$;
