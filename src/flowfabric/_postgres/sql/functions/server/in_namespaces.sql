-- in_namespaces: which executions and flows exist and belong to one of these namespaces
--
-- Called before an operation that names them, for a caller who may reach only these: false for unknown ones too. A
-- namespace never changes, so there is no race.
-- Takes    p_flow: whether the id is that of a flow.
-- Returns  one value per item, in order.
-- Roles    operate
create or replace function flowfabric.in_namespaces(
    p_partition integer[], p_id uuid[], p_flow boolean[], p_namespaces text[])
returns boolean[]
language sql stable security definer as $$
    select coalesce(array_agg(coalesce(
        case when u.is_flow
             then (select f.namespace = any (p_namespaces) from flowfabric.flow f
                   where f.partition = u.partition and f.flow_id = u.id)
             else (select e.namespace = any (p_namespaces) from flowfabric.execution e
                   where e.partition = u.partition and e.id = u.id) end, false) order by u.place), '{}')
    from unnest(p_partition, p_id, p_flow) with ordinality as u (partition, id, is_flow, place)
$$;
