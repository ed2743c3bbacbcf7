-- read_flow_tags: the tags of a flow; no row for an unknown flow.
--
-- Roles    read, submit, work, operate
create or replace function flowfabric.read_flow_tags(p_partition integer, p_flow uuid) returns table (tags jsonb)
language sql stable security definer as $$
    select f.tags from flowfabric.flow f where f.partition = p_partition and f.flow_id = p_flow
$$;
