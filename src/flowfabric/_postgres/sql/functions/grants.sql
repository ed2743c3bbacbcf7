-- Grants: the right to claim one execution, given to one worker for a short time. A grant changes no state; while it
-- lives the ready row is hidden from other claims. See start_attempts.sql for what consuming one does.

-- grant_message: what a grant key signs.
create or replace function flowfabric.grant_message(
    p_partition integer, p_id uuid, p_worker text, p_instance text, p_expires_ms bigint, p_kind text) returns text
language sql immutable as $$
    select '{fp:' || p_partition || '}|' || p_id || '|' || p_worker || '|' || p_instance || '|' || p_expires_ms
           || case when p_kind = 'reclaim' then '|reclaim' else '' end
$$;

-- write_grant: sign and store a grant, and hide the ready row. Answers the key and the expiry, or no row when no
-- signing key exists.
create or replace function flowfabric.write_grant(
    e flowfabric.execution, p_kind text, p_worker text, p_instance text, p_lane text, p_hash text,
    p_capabilities text[], p_snapshot text, p_summary text, p_ttl_ms bigint, p_now timestamptz)
returns table (grant_key text, expires_at timestamptz)
language plpgsql as $$
declare
    k flowfabric.keystore;
    v_expires timestamptz := date_trunc('milliseconds', p_now + flowfabric.ms(p_ttl_ms));
    v_ms bigint := (extract(epoch from v_expires) * 1000)::bigint;
    v_key text;
begin
    select x.* into k from flowfabric.keystore x where x.state = 'current';
    if not found then
        return;
    end if;
    v_key := 'pg:' || case when p_kind = 'reclaim' then 'reclaim:' else '' end
             || '{fp:' || e.partition || '}:' || e.id || ':' || v_ms || ':' || k.kid || ':'
             || encode(flowfabric.hmac(k.inner_key, k.outer_key, convert_to(
                    k.kid || ':' || flowfabric.grant_message(e.partition, e.id, p_worker, p_instance, v_ms, p_kind),
                    'UTF8')), 'hex');
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
    where r.route = e.route and r.rank = 9000 - e.priority and r.created_at = e.created_at and r.id = e.id
      and r.partition = e.partition;
    return query select v_key, v_expires;
end;
$$;

-- verify_grant: ok, or exactly one reason why a grant key is worth nothing.
create or replace function flowfabric.verify_grant(p_partition integer, p_id uuid, p_key text) returns text
language plpgsql security definer set search_path = flowfabric, pg_temp
set plan_cache_mode = force_generic_plan
set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set jit = off as $$
declare
    v_now timestamptz := flowfabric.now();
    v_part text[] := regexp_match(
        p_key, '^pg:(reclaim:)?\{fp:(\d{1,5})\}:([0-9a-f-]{36}):(\d{1,15}):([^:]{1,64}):([0-9a-f]{64})$');
    k flowfabric.keystore;
    g flowfabric.claim_grant;
begin
    if v_part is null or v_part[2]::integer <> p_partition or v_part[3] <> p_id::text then
        return 'malformed';
    elsif to_timestamp(v_part[4]::bigint / 1000.0) <= v_now then
        return 'expired';
    end if;
    select x.* into k from flowfabric.keystore x
    where x.kid = v_part[5] and (x.state = 'current' or (x.state = 'verifying' and x.expires_at > v_now));
    if not found then
        return 'unknown_kid';
    end if;
    select x.* into g from flowfabric.claim_grant x where x.partition = p_partition and x.id = p_id;
    if not found then
        return 'unknown_grant';
    end if;
    if not flowfabric.same_bytes(decode(v_part[6], 'hex'), flowfabric.hmac(k.inner_key, k.outer_key, convert_to(
            k.kid || ':' || flowfabric.grant_message(p_partition, p_id, g.worker_id, g.worker_instance_id,
                                                     v_part[4]::bigint,
                                                     case when v_part[1] is null then 'claim' else 'reclaim' end),
            'UTF8'))) then
        return 'signature_mismatch';
    end if;
    if p_key <> g.grant_key then
        return 'unknown_grant';   -- an earlier grant of the same worker, used or overwritten since
    end if;
    return 'ok';
end;
$$;

-- missing_capabilities: what the worker lacks, sorted and joined; null when it lacks nothing.
create or replace function flowfabric.missing_capabilities(p_route integer, p_capabilities text[]) returns text
language sql stable as $$
    select string_agg(c, ',' order by c collate "C")
    from flowfabric.route r, unnest(r.capabilities) c where r.id = p_route and c <> all (p_capabilities)
$$;

-- issue_claim_grant: for a scheduler; no budget or quota is asked here.
--
-- Locks    the execution.
-- Answers  ok with the key in detail and its expiry, or the refusal.
create or replace function flowfabric.issue_claim_grant(
    p_partition integer, p_id uuid, p_lane text, p_worker text, p_instance text, p_capabilities text[], p_ttl_ms bigint,
    p_hash text, p_snapshot text, p_summary text)
returns table (code text, detail text, state text, lease_epoch bigint, attempt_id uuid, at timestamptz, lane text)
language plpgsql security definer set search_path = flowfabric, pg_temp
set plan_cache_mode = force_generic_plan
set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set jit = off as $$
#variable_conflict use_column
declare
    v_lane text;
    v_now timestamptz;
    v_code text;
    v_detail text;
    v_at timestamptz;
    e flowfabric.execution;
begin
    select x.* into e from flowfabric.execution x where x.partition = p_partition and x.id = p_id for no key update;
    v_now := flowfabric.now();
    select r.lane into v_lane from flowfabric.route r where r.id = e.route;
    if e.id is null then
        v_code := 'not_found';
    elsif p_lane <> v_lane then
        v_code := 'invalid_input'; v_detail := 'lane_id';
    elsif e.state not in ('waiting', 'resumable') or e.blocking_reason <> 'waiting_for_worker' then
        v_code := 'execution_not_eligible';
    elsif exists (select from flowfabric.claim_grant g where g.partition = e.partition and g.id = e.id
                  and g.expires_at > v_now) then
        v_code := 'grant_already_exists';
    else
        v_detail := flowfabric.missing_capabilities(e.route, p_capabilities);
        if v_detail is not null then
            v_code := 'capability_mismatch';
            update flowfabric.execution x set capability_mismatch_at = v_now, mutated_at = v_now
            where x.partition = p_partition and x.id = p_id;
        else
            select w.grant_key, w.expires_at into v_detail, v_at
            from flowfabric.write_grant(e, 'claim', p_worker, p_instance, v_lane, p_hash, p_capabilities, p_snapshot,
                                        p_summary, p_ttl_ms, v_now) w;
            v_code := case when v_detail is null then 'unavailable' else 'ok' end;
        end if;
    end if;
    return query select v_code, v_detail, e.state, e.epoch, e.attempt_id, v_at, v_lane;
end;
$$;

-- claim_granted: consume a claim grant (or, for an operator, none) and start or continue the attempt.
--
-- p_call   'fresh' (claim_execution), 'resumed' (claim_resumed_execution) or 'operator' (issue_grant_and_claim).
-- Locks    the execution, then its ready row.
-- Answers  the lease as a row with code ok, or a row with the refusal only.
create or replace function flowfabric.claim_granted(
    p_call text, p_partition integer, p_id uuid, p_lane text, p_worker text, p_instance text, p_lease uuid,
    p_attempt uuid, p_ttl_ms bigint, p_grant_key text, p_policy text, p_timeout_ms bigint, p_deadline_at timestamptz)
returns table (
    code text, detail text, partition integer, id uuid, handle_kind text, attempt_index integer, attempt_id uuid,
    attempt_type text, lease_id uuid, lease_epoch bigint, lease_expires_at timestamptz, lane text, kind text,
    namespace text, flow_id uuid, priority integer, created_at timestamptz, payload bytea, payload_encoding text,
    tags jsonb, deadline_at timestamptz, attempt_timeout_at timestamptz, retries integer, reclaims integer,
    replays integer, upstreams uuid[], upstream_states text[], upstream_results bytea[], upstream_encodings text[])
language plpgsql security definer set search_path = flowfabric, pg_temp
set plan_cache_mode = force_generic_plan
set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set jit = off as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_code text := 'ok';
    v_detail text;
    e flowfabric.execution;
    g flowfabric.claim_grant;
begin
    select x.* into e from flowfabric.execution x where x.partition = p_partition and x.id = p_id for no key update;
    v_now := flowfabric.now();
    select x.* into g from flowfabric.claim_grant x where x.partition = p_partition and x.id = p_id;
    if e.id is null then
        v_code := 'not_found';
    elsif p_lane is not null and p_lane <> (select r.lane from flowfabric.route r where r.id = e.route) then
        v_code := 'invalid_input'; v_detail := 'lane_id';
    elsif p_call <> 'operator' and e.state = 'active' and e.lease_lost is null and e.lease_expires_at > v_now
          and e.lease_id = p_lease and (p_attempt is null or e.attempt_id = p_attempt) then
        -- The answer to the first call was lost: give it again.
        return query
        select 'ok'::text, 'again'::text, e.partition, e.id,
               case when e.attempt_resumed_at is null then 'fresh' else 'resumed' end, e.attempt_index, e.attempt_id,
               e.attempt_type, e.lease_id, e.epoch, e.lease_expires_at, r.lane, r.kind, e.namespace, e.flow_id,
               e.priority, e.created_at, coalesce(i.payload, e.payload),
               case when i.payload is null then e.payload_encoding else i.encoding end, e.tags, e.deadline_at,
               e.attempt_timeout_at, e.retries, e.reclaims, e.replays, i.upstreams, i.states, i.results, i.encodings
        from flowfabric.route r
        cross join lateral flowfabric.inputs_of(e.partition, e.id) i
        where r.id = e.route;
        return;
    elsif e.completed_at is not null or e.state in ('active', 'suspended') then
        v_code := case when p_call = 'operator' then 'execution_not_eligible' else 'execution_not_leaseable' end;
    elsif p_call = 'operator' and g.expires_at > v_now then
        v_code := 'grant_already_exists';
    elsif e.state not in ('waiting', 'resumable') or e.blocking_reason <> 'waiting_for_worker' then
        v_code := case when p_call = 'operator' then 'execution_not_eligible' else 'execution_not_leaseable' end;
    elsif p_call = 'fresh' and e.pending = 'interrupted' then
        v_code := 'use_claim_resumed_execution';
    elsif p_call = 'resumed' and e.pending <> 'interrupted' then
        v_code := 'not_a_resumed_execution';
    elsif p_call <> 'operator' and (g.id is null or g.kind <> 'claim' or g.worker_id <> p_worker
          or (p_grant_key is not null
              and (p_grant_key <> g.grant_key or flowfabric.verify_grant(p_partition, p_id, p_grant_key)
                   not in ('ok', 'expired')))) then
        v_code := 'invalid_claim_grant';
    elsif p_call = 'fresh' and flowfabric.is_used(p_partition, p_id, p_lease, p_attempt) then
        v_code := 'invalid_input'; v_detail := 'used_id';
    elsif p_call <> 'operator' and g.expires_at <= v_now then
        v_code := 'claim_grant_expired';
        delete from flowfabric.claim_grant x where x.partition = p_partition and x.id = p_id;
    end if;
    if v_code = 'ok' then
        perform flowfabric.drop_ready(array[p_partition], array[p_id]);
        return query
        select 'ok'::text, null::text, s.* from flowfabric.start_attempts(
            (select array[x.ctid] from flowfabric.execution x where x.partition = p_partition and x.id = p_id),
            array[p_lease], array[p_attempt], p_worker, p_instance, p_ttl_ms,
            p_timeout_ms, p_deadline_at, p_policy::jsonb, null, e.pending <> 'first', v_now) s;
    else
        code := v_code; detail := v_detail; partition := p_partition; id := p_id;
        attempt_id := e.attempt_id; lease_epoch := e.epoch;
        return next;
    end if;
end;
$$;

-- issue_reclaim_grant: the right to replace a lost lease.
--
-- Locks    the execution.
-- Answers  ok with the key in detail and its expiry; not_reclaimable with the reason; reclaim_cap_exceeded (the
--          execution has then failed) with the count in lease_epoch; or the refusal.
create or replace function flowfabric.issue_reclaim_grant(
    p_partition integer, p_id uuid, p_lane text, p_worker text, p_instance text, p_capabilities text[], p_ttl_ms bigint,
    p_hash text, p_snapshot text, p_summary text, p_max_reclaims bigint)
returns table (code text, detail text, state text, lease_epoch bigint, attempt_id uuid, at timestamptz, lane text)
language plpgsql security definer set search_path = flowfabric, pg_temp
set plan_cache_mode = force_generic_plan
set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set jit = off as $$
#variable_conflict use_column
declare
    v_lane text;
    v_now timestamptz;
    v_code text;
    v_detail text;
    v_at timestamptz;
    v_count bigint;
    e flowfabric.execution;
begin
    if not exists (select from flowfabric.keystore k where k.state = 'current') then
        return query select 'unavailable', null::text, null::text, null::bigint, null::uuid, null::timestamptz, null::text;
        return;
    end if;
    select x.* into e from flowfabric.execution x where x.partition = p_partition and x.id = p_id for no key update;
    v_now := flowfabric.now();
    if e.id is not null and e.state = 'active' and e.lease_lost is null and e.lease_expires_at <= v_now then
        perform flowfabric.mark_expired(array[p_partition], array[p_id], v_now);
        select x.* into e from flowfabric.execution x where x.partition = p_partition and x.id = p_id;
    end if;
    select r.lane into v_lane from flowfabric.route r where r.id = e.route;
    if e.id is null then
        v_code := 'not_found';
    elsif p_lane <> v_lane then
        v_code := 'invalid_input'; v_detail := 'lane_id';
    elsif e.state <> 'active' then
        v_code := 'not_reclaimable'; v_detail := 'execution is ' || e.state;
    elsif e.lease_lost is null then
        v_code := 'not_reclaimable'; v_detail := 'the lease is live';
    elsif exists (select from flowfabric.claim_grant g where g.partition = e.partition and g.id = e.id
                  and g.expires_at > v_now) then
        v_code := 'grant_already_exists';
    else
        v_detail := flowfabric.missing_capabilities(e.route, p_capabilities);
        if v_detail is not null then
            v_code := 'not_reclaimable';
            v_detail := 'capability_mismatch:' || v_detail;
            update flowfabric.execution x set capability_mismatch_at = v_now, mutated_at = v_now
            where x.partition = p_partition and x.id = p_id;
        elsif e.reclaims >= flowfabric.reclaim_cap(e.policy, p_max_reclaims) then
            v_code := 'reclaim_cap_exceeded'; v_count := e.reclaims;
            perform flowfabric.end_capped(array[p_partition], array[p_id], v_now);
        else
            v_code := 'ok';
            select w.grant_key, w.expires_at into v_detail, v_at
            from flowfabric.write_grant(e, 'reclaim', p_worker, p_instance, v_lane, p_hash, p_capabilities, p_snapshot,
                                        p_summary, p_ttl_ms, v_now) w;
        end if;
    end if;
    return query select v_code, v_detail, e.state, v_count, e.attempt_id, v_at, v_lane;
end;
$$;

-- reclaim: consume a reclaim grant: a new attempt under a new lease replaces the one that was lost.
--
-- Locks    the execution, then its ready row.
-- Answers  the lease as a row with code ok; not_reclaimable, reclaim_cap_exceeded (count in lease_epoch),
--          grant_not_found, or the refusal.
create or replace function flowfabric.reclaim(
    p_partition integer, p_id uuid, p_lane text, p_worker text, p_instance text, p_lease uuid, p_attempt uuid,
    p_ttl_ms bigint, p_grant_key text, p_policy text, p_max_reclaims bigint)
returns table (
    code text, detail text, partition integer, id uuid, handle_kind text, attempt_index integer, attempt_id uuid,
    attempt_type text, lease_id uuid, lease_epoch bigint, lease_expires_at timestamptz, lane text, kind text,
    namespace text, flow_id uuid, priority integer, created_at timestamptz, payload bytea, payload_encoding text,
    tags jsonb, deadline_at timestamptz, attempt_timeout_at timestamptz, retries integer, reclaims integer,
    replays integer, upstreams uuid[], upstream_states text[], upstream_results bytea[], upstream_encodings text[])
language plpgsql security definer set search_path = flowfabric, pg_temp
set plan_cache_mode = force_generic_plan
set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set jit = off as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_code text := 'ok';
    v_detail text;
    v_count bigint;
    e flowfabric.execution;
    g flowfabric.claim_grant;
begin
    select x.* into e from flowfabric.execution x where x.partition = p_partition and x.id = p_id for no key update;
    v_now := flowfabric.now();
    select x.* into g from flowfabric.claim_grant x
    where x.partition = p_partition and x.id = p_id and x.kind = 'reclaim' and x.expires_at > v_now;
    if e.id is null then
        v_code := 'not_found';
    elsif p_lane is not null and p_lane <> (select r.lane from flowfabric.route r where r.id = e.route) then
        v_code := 'invalid_input'; v_detail := 'lane_id';
    elsif g.id is null then
        v_code := 'grant_not_found';
    elsif g.worker_id <> p_worker then
        v_code := 'invalid_input'; v_detail := 'worker_id';
    elsif p_grant_key is not null
          and (p_grant_key <> g.grant_key or flowfabric.verify_grant(p_partition, p_id, p_grant_key) <> 'ok') then
        v_code := 'grant_not_found';
    elsif flowfabric.is_used(p_partition, p_id, p_lease, p_attempt) then
        v_code := 'invalid_input'; v_detail := 'used_id';
    elsif exists (select from flowfabric.cancel_member c where c.partition = e.partition and c.id = e.id) then
        v_code := 'not_reclaimable'; v_detail := 'its flow was cancelled';
        delete from flowfabric.claim_grant x where x.partition = p_partition and x.id = p_id;
    elsif e.state <> 'active' or (e.lease_lost is null and e.lease_expires_at > v_now) then
        v_code := 'not_reclaimable';
        v_detail := case when e.state = 'active' then 'the lease is live' else 'execution is ' || e.state end;
        delete from flowfabric.claim_grant x where x.partition = p_partition and x.id = p_id;
    else
        if e.lease_lost is null then
            perform flowfabric.mark_expired(array[p_partition], array[p_id], v_now);
        end if;
        if e.reclaims >= flowfabric.reclaim_cap(e.policy, p_max_reclaims) then
            v_code := 'reclaim_cap_exceeded'; v_count := e.reclaims;
            perform flowfabric.end_capped(array[p_partition], array[p_id], v_now);
        end if;
    end if;
    if v_code = 'ok' then
        perform flowfabric.drop_ready(array[p_partition], array[p_id]);
        return query
        select 'ok'::text, null::text, s.* from flowfabric.start_attempts(
            (select array[x.ctid] from flowfabric.execution x where x.partition = p_partition and x.id = p_id),
            array[p_lease], array[p_attempt], p_worker, p_instance, p_ttl_ms,
            null, null, p_policy::jsonb, null, true, v_now) s;
    else
        code := v_code; detail := v_detail; partition := p_partition; id := p_id; lease_epoch := v_count;
        return next;
    end if;
end;
$$;

-- is_used: whether an attempt of this execution already bears an id that its caller minted.
create or replace function flowfabric.is_used(p_partition integer, p_id uuid, p_lease uuid, p_attempt uuid)
returns boolean
language sql stable as $$
    select exists (select from flowfabric.attempts_of(p_partition, p_id) a
                   where a.attempt_id = p_attempt or a.lease_id = p_lease)
$$;
