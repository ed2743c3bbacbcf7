-- claim_for_worker: grants for up to p_max executions of a lane, best rank first: a scheduler asks for a worker
--
-- The same selection as claim, which ends in leases: here each execution is reserved for the worker until its grant
-- expires. One that waits for a first or another attempt, or for one that was interrupted, gets a claim grant; one whose
-- lease was lost gets a reclaim grant. Executions that changed code stopped are left to claims, which say their code.
-- Takes    p_kinds: null: every kind, in every version. p_service: as claim. p_namespace: as claim.
--          p_hash: of the capabilities, stored with the grants.
-- Locks    ready rows and their executions, skipping locked rows; it waits only for the quota policies of executions with
--          limits (limits/take_admitted.sql), before it locks anything else. The slots it takes end with the grants.
-- Returns  one row per grant, best first; no row without work, or if a call that moves denied executions aside has not come to
--          the end of them: ask again; one row with the code unavailable without a signing key.
-- Roles    work, operate
create or replace function flowfabric.claim_for_worker(
    p_lane text, p_kinds text[], p_capabilities text[], p_worker text, p_instance text, p_ttl_ms bigint, p_max integer,
    p_service integer, p_namespace text, p_hash text)
returns table (code text, kind text, partition integer, id uuid, is_resumed boolean, grant_key text, expires_at timestamptz)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_ttl interval := flowfabric.ms(p_ttl_ms);
    v_auto_reclaim boolean;
    v_limited boolean;
    v_routes integer[]; v_ranks integer[]; v_created timestamptz[]; v_floor_ids uuid[];
    v_taken flowfabric.taken;
    k flowfabric.keystore;
begin
    perform flowfabric.require_read_committed();
    if p_ttl_ms not between 1 and 60000 or p_max not between 1 and 64 or num_nulls(p_ttl_ms, p_max) > 0 then
        raise exception 'the time to live or the number of grants is out of bounds' using errcode = 'invalid_parameter_value';
    end if;
    select x.* into k from flowfabric.keystore x where x.state = 'current';
    if not found then
        code := 'unavailable';
        return next;
        return;
    end if;
    select flowfabric.now(), d.auto_reclaim into v_now, v_auto_reclaim
    from flowfabric.deployment d, flowfabric.lane l
    where l.name = p_lane and l.state in ('active', 'draining')
      and exists (select from flowfabric.ready_floor f where f.lane = p_lane);
    if not found then
        return;
    end if;
    select array_agg(q.route), array_agg(q.rank), array_agg(q.created_at), array_agg(q.id), bool_or(q.limited)
    into v_routes, v_ranks, v_created, v_floor_ids, v_limited
    from (select distinct on (f.route) f.route, f.rank, f.created_at, f.id, r.limited
          from flowfabric.ready_floor f join flowfabric.route r on r.id = f.route
          where f.lane = p_lane and (p_kinds is null or r.kind = any (p_kinds)) and r.capabilities <@ p_capabilities
            and r.not_for is null
            and (r.version is null or p_kinds is null or flowfabric.serves(p_service, r.kind, r.version, null))
          order by f.route, f.rank, f.created_at, f.id) q;
    if v_limited then
        v_taken := flowfabric.take_admitted(v_routes, v_ranks, v_created, v_floor_ids, p_namespace, p_max, v_auto_reclaim,
                                            v_ttl, null, true, v_now);
    elsif v_routes is not null then
        v_taken := flowfabric.take_best(v_routes, v_ranks, v_created, v_floor_ids, p_namespace, p_max, v_auto_reclaim,
                                        date_trunc('milliseconds', v_now + v_ttl), v_now);
    end if;
    if coalesce(cardinality(v_taken.ids), 0) = 0 then
        perform flowfabric.judge_for_claim(p_lane, p_kinds, p_capabilities, p_service);
        return;
    end if;
    return query
    with taken as (
        -- Each is valid as long as its ready row is hidden.
        select e.*, r.granted_until as until, case when e.lease_lost is null then 'claim' else 'reclaim' end as grant_kind
        from unnest(v_taken.tids) as u (tid) join flowfabric.execution e on e.ctid = u.tid
        cross join lateral (select x.granted_until from flowfabric.ready x
                            where x.route = flowfabric.ready_route(e) and x.rank = flowfabric.rank_of(e.priority)
                              and x.created_at = e.created_at and x.id = e.id and x.partition = e.partition offset 0) r
    ), granted as (
        insert into flowfabric.claim_grant
            (partition, id, kind, grant_key, worker_id, worker_instance_id, lane, capability_hash, worker_capabilities, ttl_ms,
             issued_at, expires_at, quota_policy_ids)
        select t.partition, t.id, t.grant_kind,
               flowfabric.sign_grant(k, t.partition, t.id, t.grant_kind, p_worker, p_instance, t.until), p_worker, p_instance,
               p_lane, p_hash, p_capabilities, p_ttl_ms, greatest(v_now, t.until - v_ttl), t.until,
               case when t.limits is not null then (
                   select array_agg(s.policy_id order by s.policy_id) from flowfabric.quota_slot s
                   where s.id = t.id and s.partition = t.partition and s.until = t.until) end
        from taken t
        returning partition, id, kind, grant_key, expires_at
    )
    select 'ok'::text, g.kind, g.partition, g.id, e.pending = 'interrupted' and e.lease_lost is null, g.grant_key, g.expires_at
    from granted g join flowfabric.execution e on e.partition = g.partition and e.id = g.id
    order by e.priority desc, e.created_at, e.id;
end;
$$;
