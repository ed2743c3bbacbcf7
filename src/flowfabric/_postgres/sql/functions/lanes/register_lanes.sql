-- Lanes: named queues with a state: active; paused (accepts work, hands none out); draining (hands out, accepts none);
-- disabled (neither).

-- register_lanes: returns how many were new.
--
-- Roles    work, operate
create or replace function flowfabric.register_lanes(p_names text[]) returns integer
language sql volatile security definer as $$
    with made as (
        insert into flowfabric.lane (name, registered_at, registered_by)
        select distinct n, flowfabric.now(), 'boot' from unnest(p_names) n order by n
        on conflict do nothing
        returning 1
    )
    select count(*)::integer from made
$$;
