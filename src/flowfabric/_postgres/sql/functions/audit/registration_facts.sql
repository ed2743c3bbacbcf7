-- audit_registration_facts: A registered worker serves something known, in sorted lanes, and its times are in order.
create or replace function flowfabric.audit_registration_facts(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    select 'registration_facts', null::integer, null::uuid, r.worker_instance_id
    from flowfabric.registration r
    where not exists (select from flowfabric.service s where s.id = r.service)
       or r.liveness_ttl < interval '1 millisecond' or r.heartbeat_at < r.registered_at
       or r.lanes = '{}' or r.lanes <> array(select distinct l collate "C" from unnest(r.lanes) as l order by 1)
$$;
