-- standing_executions: the verdict of an item with a bad policy, from the checks that come before the policy
--
-- Returns  one row per item: duplicate (with the id that exists), lane_closed, or free.
-- Roles    submit, work, operate
create or replace function flowfabric.standing_executions(
    p_partition integer[], p_id uuid[], p_namespace text[], p_key text[], p_flow uuid[], p_lane text[])
returns table (ordinal integer, code text, id uuid)
language sql volatile security definer as $$
    select u.ord::integer,
           case when i.id is not null or e.id is not null then 'duplicate'
                when l.state in ('draining', 'disabled') then 'lane_closed' else 'free' end,
           coalesce(i.id, u.id)
    from unnest(p_partition, p_id, p_namespace, p_key, p_flow, p_lane) with ordinality
         as u (partition, id, namespace, key, flow, lane, ord)
    left join flowfabric.idempotency i on i.namespace = coalesce(u.namespace, '') and i.key = u.key
         and i.scope = coalesce(u.flow, flowfabric.zero_uuid())
         and i.expires_at > flowfabric.now()
    left join flowfabric.execution e on e.partition = u.partition and e.id = u.id
    left join flowfabric.lane l on l.name = u.lane
    order by u.ord
$$;
