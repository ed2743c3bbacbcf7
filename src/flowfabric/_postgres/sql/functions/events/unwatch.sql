-- unwatch: stop watching these executions.
--
-- Roles    submit, work, operate
create or replace function flowfabric.unwatch(
    p_instance uuid, p_topic text, p_partition integer[], p_id uuid[]) returns void
language sql volatile security definer as $$
    delete from flowfabric.watch w where w.ctid = any (array(
        select l.tid from unnest(p_partition, p_id) as u (partition, id)
        cross join lateral (select x.ctid as tid from flowfabric.watch x
                            where x.partition = u.partition and x.id = u.id and x.topic = p_topic and x.instance = p_instance
                            offset 0 for update skip locked) l))
$$;
