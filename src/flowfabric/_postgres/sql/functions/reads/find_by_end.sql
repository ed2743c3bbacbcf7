-- find_by_end: executions and flows of one partition whose ids end with these hex digits
--
-- Reads    the keys of that partition alone; the end of an id says which it is.
create or replace function flowfabric.find_by_end(p_partition integer, p_end text, p_limit integer)
returns table (partition integer, id uuid, is_flow boolean)
language sql stable as $$
    (select e.partition, e.id, false from flowfabric.execution e
     where e.partition = p_partition and right(encode(uuid_send(e.id), 'hex'), length(p_end)) = p_end
     order by e.id desc limit p_limit)
    union all
    (select f.partition, f.flow_id, true from flowfabric.flow f
     where f.partition = p_partition and right(encode(uuid_send(f.flow_id), 'hex'), length(p_end)) = p_end
     order by f.flow_id desc limit p_limit)
$$;
