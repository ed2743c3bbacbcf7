-- tell_watchers: notify the processes that watch ended executions, once per process.
--
-- Never waits: for a row that its watcher is renewing it notifies too, and the row stays until it expires.
create or replace function flowfabric.tell_watchers(p_partition integer[], p_id uuid[]) returns void
language plpgsql as $$
begin
    perform pg_notify('flowfabric_' || d.instance, 'ended')
    from (select distinct w.instance from unnest(p_partition, p_id) as u (partition, id)
          cross join lateral (select x.instance, x.until from flowfabric.watch x
                              where x.partition = u.partition and x.id = u.id offset 0) w
          where w.until > clock_timestamp()) d;
    delete from flowfabric.watch w using (
        select l.tid from unnest(p_partition, p_id) as u (partition, id)
        cross join lateral (select x.ctid as tid from flowfabric.watch x
                            where x.partition = u.partition and x.id = u.id
                            offset 0 for update skip locked) l) told
    where w.ctid = told.tid;
end;
$$;
