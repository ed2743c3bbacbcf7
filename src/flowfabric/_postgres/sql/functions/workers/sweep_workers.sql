-- sweep_workers: remove up to p_limit workers whose time to live has passed; returns how many
--
-- Called by the duty worker_registry_ttl_sweep. Nothing waits for it: such workers count as absent before.
-- Roles    work, operate
-- Locks    their registrations, skipping locked rows.
create or replace function flowfabric.sweep_workers(p_limit integer) returns integer
language plpgsql security definer as $$
declare
    v_now timestamptz := flowfabric.now();
    v_n integer;
    v_lanes text[];
begin
    perform flowfabric.require_read_committed();
    with gone as (
        delete from flowfabric.registration r where r.ctid = any (array(
            select x.ctid from flowfabric.registration x where not flowfabric.is_alive(x, v_now)
            limit p_limit for update skip locked))
        returning r.*
    ), logged as (
        insert into flowfabric.worker_event (occurred_at, event, namespace, worker_instance_id, worker_id)
        select v_now, 'ttl_swept', g.namespace, g.worker_instance_id, g.worker_id from gone g
    )
    select (select count(*) from gone), array(select distinct l from gone g cross join lateral unnest(g.lanes) as l)
    into v_n, v_lanes;
    if v_n > 0 then
        perform flowfabric.judge_lanes(v_lanes);
    end if;
    return v_n;
end;
$$;
