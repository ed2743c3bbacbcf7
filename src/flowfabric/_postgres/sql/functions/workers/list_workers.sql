-- list_workers: the workers that are alive, by namespace and instance
--
-- Roles    read, work, operate
-- Takes    p_namespace: of one namespace, empty for workers that serve every namespace; null: all of them.
--          p_after_namespace, p_after: only those after this one.
-- Returns  what each registered with, and the groups of duties that its process leads.
create or replace function flowfabric.list_workers(
    p_namespace text, p_after_namespace text, p_after text, p_limit integer)
returns table (namespace text, worker_instance_id text, worker_id text, lanes text[], kinds text[], versions integer[],
               capabilities text[], liveness_ttl interval, registered_at timestamptz, heartbeat_at timestamptz,
               expires_at timestamptz, slots integer, package_version text, host text, pid integer, leads text[],
               at timestamptz)
language plpgsql volatile security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz := flowfabric.now();
    v_from text := coalesce(p_namespace, p_after_namespace, '');
    v_to text := coalesce(p_namespace, chr(1114111));   -- after every namespace
begin
    return query
    select r.namespace, r.worker_instance_id, r.worker_id, r.lanes, s.kinds, s.versions, s.capabilities, r.liveness_ttl,
           r.registered_at, r.heartbeat_at, r.heartbeat_at + r.liveness_ttl, r.slots, r.package_version, r.host, r.pid,
           array(select l.name from flowfabric.lead l
                 where l.instance = r.process and l.until > clock_timestamp() order by l.name),
           v_now
    from flowfabric.registration r join flowfabric.service s on s.id = r.service
    where (r.namespace, r.worker_instance_id) > (v_from, coalesce(p_after, '')) and r.namespace <= v_to
      and flowfabric.is_alive(r, v_now)
    order by r.namespace, r.worker_instance_id limit p_limit;
end;
$$;
