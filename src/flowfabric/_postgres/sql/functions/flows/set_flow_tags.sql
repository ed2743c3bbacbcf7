-- set_flow_tags: add tags to a flow or replace their values; returns whether the flow exists.
--
-- Roles    operate
create or replace function flowfabric.set_flow_tags(p_partition integer, p_flow uuid, p_tags text) returns boolean
language plpgsql security definer as $$
begin
    perform flowfabric.require_read_committed();
    update flowfabric.flow f set tags = f.tags || p_tags::jsonb, last_mutation_at = flowfabric.now()
    where f.partition = p_partition and f.flow_id = p_flow;
    return found;
end;
$$;
