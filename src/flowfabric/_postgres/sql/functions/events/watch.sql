-- watch: notify this process when one of these executions ends.
--
-- Roles    submit, work, operate
create or replace function flowfabric.watch(p_instance uuid, p_ms bigint, p_partition integer[], p_id uuid[]) returns void
language sql volatile security definer as $$
    insert into flowfabric.watch as w (partition, id, instance, until)
    select distinct u.partition, u.id, p_instance, clock_timestamp() + flowfabric.ms(p_ms)
    from unnest(p_partition, p_id) as u (partition, id)
    order by u.partition, u.id
    on conflict (partition, id, instance) do update set until = excluded.until
$$;
