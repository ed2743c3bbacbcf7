-- sleep: announce that this process waits for a notification, for at most this long.
create or replace function flowfabric.sleep(p_instance uuid, p_topic text, p_ms bigint, p_wakes_at timestamptz)
returns void
language plpgsql security definer as $$
begin
    insert into flowfabric.sleeper as s (instance, topic, until, wakes_at)
    values (p_instance, p_topic, clock_timestamp() + flowfabric.ms(p_ms), p_wakes_at)
    on conflict (instance, topic) do update set until = excluded.until, wakes_at = excluded.wakes_at;
    delete from flowfabric.sleeper s where s.until < clock_timestamp() - interval '1 hour';
end;
$$;
