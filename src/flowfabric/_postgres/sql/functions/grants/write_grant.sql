-- Grants: the right to claim one execution, given to one worker for a short time. A grant changes no state; while it
-- is valid, the ready row is hidden from other claims. Consuming one calls start_attempts.

-- write_grant: sign and store a grant, and hide the ready row. Returns the key and the expiry, or no row if there is no
-- signing key.
create or replace function flowfabric.write_grant(
    e flowfabric.execution, p_kind text, p_worker text, p_instance text, p_lane text, p_hash text,
    p_capabilities text[], p_snapshot text, p_summary text, p_ttl_ms bigint, p_now timestamptz)
returns table (grant_key text, expires_at timestamptz)
language plpgsql as $$
declare
    k flowfabric.keystore;
    v_expires timestamptz := date_trunc('milliseconds', p_now + flowfabric.ms(p_ttl_ms));
    v_key text;
begin
    select x.* into k from flowfabric.keystore x where x.state = 'current';
    if not found then
        return;
    end if;
    v_key := flowfabric.sign_grant(k, e.partition, e.id, p_kind, p_worker, p_instance, v_expires);
    insert into flowfabric.claim_grant as g
        (partition, id, kind, grant_key, worker_id, worker_instance_id, lane, capability_hash, worker_capabilities,
         route_snapshot, admission_summary, ttl_ms, issued_at, expires_at)
    values (e.partition, e.id, p_kind, v_key, p_worker, p_instance, p_lane, p_hash, p_capabilities, p_snapshot,
            p_summary, p_ttl_ms, p_now, v_expires)
    on conflict (partition, id) do update set
        kind = excluded.kind, grant_key = excluded.grant_key, worker_id = excluded.worker_id,
        worker_instance_id = excluded.worker_instance_id, lane = excluded.lane,
        capability_hash = excluded.capability_hash, worker_capabilities = excluded.worker_capabilities,
        route_snapshot = excluded.route_snapshot, admission_summary = excluded.admission_summary,
        ttl_ms = excluded.ttl_ms, issued_at = excluded.issued_at, expires_at = excluded.expires_at;
    update flowfabric.ready r set granted_until = v_expires
    where r.route = flowfabric.ready_route(e) and r.rank = flowfabric.rank_of(e.priority) and r.created_at = e.created_at and r.id = e.id
      and r.partition = e.partition;
    return query select v_key, v_expires;
end;
$$;

-- sign_grant: the key of a grant.
create or replace function flowfabric.sign_grant(
    k flowfabric.keystore, p_partition integer, p_id uuid, p_kind text, p_worker text, p_instance text,
    p_expires timestamptz) returns text
language sql immutable as $$
    select 'pg:' || case when p_kind = 'reclaim' then 'reclaim:' else '' end
           || '{fp:' || p_partition || '}:' || p_id || ':' || m.ms || ':' || k.kid || ':'
           || encode(flowfabric.hmac(k.inner_key, k.outer_key, convert_to(
                  k.kid || ':' || flowfabric.grant_message(p_partition, p_id, p_worker, p_instance, m.ms, p_kind),
                  'UTF8')), 'hex')
    from (select (extract(epoch from p_expires) * 1000)::bigint as ms) m
$$;

-- grant_message: the message that a grant key signs.
create or replace function flowfabric.grant_message(
    p_partition integer, p_id uuid, p_worker text, p_instance text, p_expires_ms bigint, p_kind text) returns text
language sql immutable as $$
    select '{fp:' || p_partition || '}|' || p_id || '|' || p_worker || '|' || p_instance || '|' || p_expires_ms
           || case when p_kind = 'reclaim' then '|reclaim' else '' end
$$;

-- missing_capabilities: the capabilities the worker lacks, sorted and joined; null if it lacks none.
create or replace function flowfabric.missing_capabilities(p_route integer, p_capabilities text[]) returns text
language sql stable as $$
    select string_agg(c, ',' order by c collate "C")
    from flowfabric.route r, unnest(r.capabilities) c where r.id = p_route and c <> all (p_capabilities)
$$;
