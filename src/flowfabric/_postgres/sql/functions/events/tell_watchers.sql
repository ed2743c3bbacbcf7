-- tell_watchers: notify the processes that watch executions, once per process and topic; of new frames with the
-- executions that have them, if they are few.
--
-- Never waits: for a row that its watcher is renewing it notifies too, and the row stays until it expires.
-- Takes    p_topic: frames, for new frames; null: the executions ended, which every watcher wants to know.
create or replace function flowfabric.tell_watchers(p_partition integer[], p_id uuid[], p_topic text) returns void
language plpgsql as $$
begin
    perform pg_notify('flowfabric_' || d.instance, d.topic)
    from (select w.instance, case when w.topic = 'frames' and count(*) <= 100
                                  then 'frames ' || string_agg(w.id::text, ' ') else w.topic end as topic
          from unnest(p_partition, p_id) as u (partition, id)
          cross join lateral (select x.id, x.instance, x.topic, x.until from flowfabric.watch x
                              where x.partition = u.partition and x.id = u.id and x.topic = coalesce(p_topic, x.topic)
                              offset 0) w
          where w.until > clock_timestamp()
          group by w.instance, w.topic) d;
    delete from flowfabric.watch w using (
        select l.tid from unnest(p_partition, p_id) as u (partition, id)
        cross join lateral (select x.ctid as tid from flowfabric.watch x
                            where x.partition = u.partition and x.id = u.id and x.topic = coalesce(p_topic, x.topic)
                            offset 0 for update skip locked) l) told
    where w.ctid = told.tid;
end;
$$;
