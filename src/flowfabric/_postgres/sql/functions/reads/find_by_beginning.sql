-- find_by_beginning: executions and flows of some partitions whose ids lie between two
--
-- Reads    one range of the key in each partition.
create or replace function flowfabric.find_by_beginning(
    p_first integer, p_last integer, p_low uuid, p_high uuid, p_limit integer)
returns table (partition integer, id uuid, is_flow boolean)
language sql stable as $$
    (select p.n, e.id, false from generate_series(p_first, p_last) as p (n)
     cross join lateral (select x.id from flowfabric.execution x
                         where x.partition = p.n and x.id between p_low and p_high order by x.id limit p_limit) e
     limit p_limit)
    union all
    (select p.n, f.flow_id, true from generate_series(p_first, p_last) as p (n)
     cross join lateral (select x.flow_id from flowfabric.flow x
                         where x.partition = p.n and x.flow_id between p_low and p_high order by x.flow_id limit p_limit) f
     limit p_limit)
$$;
