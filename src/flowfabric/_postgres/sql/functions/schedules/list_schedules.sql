-- list_schedules: one schedule by name, or a page of all, or of those of a namespace, by name.
--
-- Roles    read, work, operate
create or replace function flowfabric.list_schedules(p_name text, p_namespace text, p_after text, p_limit integer)
returns setof flowfabric.schedule
language sql stable security definer as $$
    select s.* from flowfabric.schedule s
    where (p_name is null or s.name = p_name)
      and (p_namespace is null or coalesce(s.options ->> 'namespace', '') = p_namespace)
      and (p_after is null or s.name > p_after collate "C")
    order by s.name limit p_limit
$$;
