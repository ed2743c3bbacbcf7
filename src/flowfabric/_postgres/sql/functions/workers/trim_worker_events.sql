-- trim_worker_events: remove up to p_limit events of workers that are older than the retention; returns how many
--
-- Called by the duty registry_event_trimmer.
-- Roles    work, operate
create or replace function flowfabric.trim_worker_events(p_limit integer) returns integer
language plpgsql security definer as $$
declare
    v_until timestamptz;
    v_n integer;
begin
    perform flowfabric.require_read_committed();
    select flowfabric.now() - d.worker_event_retention into v_until from flowfabric.deployment d;
    delete from flowfabric.worker_event w where w.ctid = any (array(
        select x.ctid from flowfabric.worker_event x where x.occurred_at <= v_until
        order by x.occurred_at limit p_limit for update skip locked));
    get diagnostics v_n = row_count;
    return v_n;
end;
$$;
