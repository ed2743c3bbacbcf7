-- watch: notify this process when one of these executions ends (p_topic ended), or has new frames or ends (frames).
--
-- Roles    submit, work, operate
create or replace function flowfabric.watch(
    p_instance uuid, p_topic text, p_ms bigint, p_partition integer[], p_id uuid[]) returns void
language sql volatile security definer as $$
    insert into flowfabric.watch as w (partition, id, topic, instance, until)
    select distinct u.partition, u.id, p_topic, p_instance, clock_timestamp() + flowfabric.ms(p_ms)
    from unnest(p_partition, p_id) as u (partition, id)
    order by u.partition, u.id
    on conflict (partition, id, topic, instance) do update set until = excluded.until
$$;
