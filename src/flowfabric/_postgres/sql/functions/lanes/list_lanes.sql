-- list_lanes: the registered lanes and their states, by name.
--
-- Roles    read, operate
create or replace function flowfabric.list_lanes(p_after text, p_limit integer)
returns table (name text, state text, registered_at timestamptz, registered_by text)
language sql stable security definer as $$
    select l.name, l.state, l.registered_at, l.registered_by from flowfabric.lane l
    where p_after is null or l.name > p_after collate "C" order by l.name limit p_limit
$$;
