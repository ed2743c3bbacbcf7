-- move_aside: claimable -> rate_limited, for up to 1,000 ready rows from a position on that closed limits deny
--
-- Called by take_admitted, which holds the heads of the policies and a lock on the budgets: no limit opens meanwhile. A row
-- names the one limit that denied it, budgets first; the call that opens that limit finds it there (promote_limited).
-- Each call leaves one row per reason for the counts of denials (count_denials).
-- Takes    p_budgets, p_budget_details, p_dimensions: exhausted budgets, sorted, why, and in which dimension.
--          p_names, p_rooms: the policies.
-- Locks    executions, skipping locked ones.
-- Returns  how many were moved.
create or replace function flowfabric.move_aside(
    p_routes integer[], p_ranks integer[], p_created timestamptz[], p_floors uuid[], p_namespace text, p_rank integer,
    p_at timestamptz, p_id uuid,
    p_budgets uuid[], p_budget_details text[], p_dimensions text[], p_names text[], p_rooms flowfabric.quota_room[], p_now timestamptz)
returns integer
language plpgsql as $$
declare
    v_tids tid[]; v_partitions integer[]; v_ids uuid[]; v_limit_ids uuid[]; v_keys text[]; v_details text[]; v_reasons text[];
    v_retries timestamptz[];
    v_retry timestamptz[];   -- per policy: when its rate has room again
    v_gone uuid[];
    v_first timestamptz;
    v_now timestamptz;
begin
    -- A window that this claim filled had room when it was read: its first entry leaves first.
    select array_agg(coalesce(r.retry_at, case when r.rate > 0 and r.rate_left <= 0 then (
                         select e.admitted_at + r.span from flowfabric.quota_entry e
                         where e.policy_id = r.policy_id and e.key = r.key and e.admitted_at > p_now - r.span
                         order by e.admitted_at limit 1) end)
                     + random() * r.jitter_ms * interval '1 millisecond' order by o) into v_retry
    from unnest(p_rooms) with ordinality as r (policy_id, key, rate, cap, span, jitter_ms, rate_left, slots_left, retry_at, floor, low, o);
    select array_agg(a.tid), array_agg(a.partition), array_agg(a.id), array_agg(d.limit_id), array_agg(d.key),
           array_agg(d.detail), array_agg(d.retry_at), array_agg(d.reason)
    into v_tids, v_partitions, v_ids, v_limit_ids, v_keys, v_details, v_retries, v_reasons
    from (select c.*
          from flowfabric.best_ready(p_routes, p_ranks, p_created, p_floors, p_namespace, p_rank, p_at, p_id, 1000, false,
                                     p_now) c
          order by c.rank, c.created_at, c.id limit 1000) a
    cross join lateral (select x.* from flowfabric.limit_set x where x.digest = a.limits limit 1) l
    cross join lateral (
        select f.* from (
            select 0 as kind, b.id as limit_id, '' as key, p_budget_details[array_position(p_budgets, b.id)] as detail,
                   null::timestamptz as retry_at, 'budget' as reason
            from unnest(l.budget_ids) as b (id) where l.budget_ids && p_budgets and b.id = any (p_budgets)
            union all
            select 1, h.id, h.key,
                   case when is_late.rate then 'quota ' || h.id || ': rate limit ' || p_rooms[h.no].rate || ' per '
                             || extract(epoch from p_rooms[h.no].span)::bigint || 's window'
                        else 'quota ' || h.id || ': concurrency cap ' || p_rooms[h.no].cap end,
                   case when is_late.rate then v_retry[h.no] end, case when is_late.rate then 'rate' else 'concurrency' end
            from (select k.id, k.key, array_position(p_names, flowfabric.head_name(k.id, k.key)) as no
                  from unnest(l.quota_ids, l.quota_keys) as k (id, key)) h
            cross join lateral (
                select p_rooms[h.no].rate > 0 and p_rooms[h.no].rate_left <= 0 and not exists (
                           select from (select x.* from flowfabric.quota_entry x
                                        where x.id = a.id and x.partition = a.partition offset 0) e
                           where e.policy_id = h.id and e.key = h.key
                             and e.admitted_at > p_now - p_rooms[h.no].span) as rate) is_late
            where h.no is not null and p_rooms[h.no].policy_id is not null
              and (is_late.rate or (p_rooms[h.no].cap > 0 and p_rooms[h.no].slots_left <= 0))
              -- The fence (offset 0) keeps the plan on the key: the index of numbers has every slot of a policy.
              and not exists (select from (select x as slot from flowfabric.quota_slot x
                                           where x.id = a.id and x.partition = a.partition offset 0) s
                              where (s.slot).policy_id = h.id and flowfabric.is_live(s.slot, p_now))) f
        order by f.kind, f.limit_id limit 1) d;
    if v_ids is null then
        return 0;
    end if;

    select array_agg(l.tid), array_agg(l.partition), array_agg(l.id), array_agg(l.limit_id), array_agg(l.key), array_agg(l.detail),
           array_agg(l.retry_at), array_agg(l.reason)
    into v_tids, v_partitions, v_ids, v_limit_ids, v_keys, v_details, v_retries, v_reasons
    from (select u.*
          from unnest(v_tids, v_partitions, v_ids, v_limit_ids, v_keys, v_details, v_retries, v_reasons)
               as u (tid, partition, id, limit_id, key, detail, retry_at, reason)
          join flowfabric.execution e on e.partition = u.partition and e.id = u.id
          where e.state in ('waiting', 'resumable') and e.blocking_reason = 'waiting_for_worker'
          for no key update of e skip locked) l;
    if v_ids is null then
        return 0;
    end if;
    v_now := flowfabric.now();   -- some were created after p_now
    -- As in take_ready: one that changed just before the lock was granted is left alone.
    with gone as (
        delete from flowfabric.ready r where r.ctid = any (v_tids) and r.id = any (v_ids) returning r.id, r.granted_until
    ), unused as (
        delete from flowfabric.claim_grant g where g.ctid = any (array(
            select f.tid from unnest(v_partitions, v_ids) as u (partition, id)
            cross join lateral (select x.ctid as tid from flowfabric.claim_grant x
                                where x.partition = u.partition and x.id = u.id offset 0) f
            where u.id in (select x.id from gone x where x.granted_until is not null)))
    )
    select array_agg(g.id) into v_gone from gone g;
    with moved as (
        update flowfabric.execution e
        set state = 'rate_limited',
            blocking_reason = case when u.key = '' then 'waiting_for_budget' else 'waiting_for_quota' end,
            blocking_detail = u.detail, transitioned_at = v_now, mutated_at = null
        from unnest(v_partitions, v_ids, v_limit_ids, v_keys, v_details, v_retries, v_reasons)
             as u (partition, id, limit_id, key, detail, retry_at, reason)
        where e.partition = u.partition and e.id = u.id and (cardinality(v_gone) = cardinality(v_ids) or u.id = any (v_gone))
        returning e.partition, e.id, e.created_at, e.priority, e.blocking_reason, e.flow_id, u.limit_id, u.key, u.retry_at,
                  u.reason
    ), counted as (
        insert into flowfabric.denial (denied_at, lane, reason, dimension, count)
        select v_now, (select r.lane from flowfabric.route r where r.id = p_routes[1]), d.reason, d.dimension, count(*)
        from (select m.reason, coalesce(p_dimensions[array_position(p_budgets, m.limit_id)], '') as dimension from moved m) d
        group by d.reason, d.dimension
    ), touched as (
        insert into flowfabric.flow_touched select distinct m.partition, m.flow_id from moved m where m.flow_id is not null
    ), listed as (
        insert into flowfabric.blocked
            (blocking_reason, created_at, id, partition, rank, limit_id, limit_key, retry_at, blocked_at)
        select m.blocking_reason, m.created_at, m.id, m.partition, flowfabric.rank_of(m.priority), m.limit_id, m.key,
               m.retry_at, v_now
        from moved m
    ), due as (
        -- A rate has room at its time. A slot may be given back just now by a call that does not see these rows yet: check
        -- again soon.
        insert into flowfabric.limit_due (due_at, limit_id, key)
        select d.due_at, d.limit_id, d.key
        from (select m.limit_id, m.key, min(coalesce(m.retry_at, v_now + interval '100 milliseconds')) as due_at
              from moved m where m.key <> '' group by m.limit_id, m.key) d
        where not exists (select from flowfabric.limit_due x
                          where x.limit_id = d.limit_id and x.key = d.key and x.due_at between v_now and d.due_at)
        returning due_at
    )
    select min(d.due_at) into v_first from due d;
    if v_first is not null then
        perform flowfabric.wake_duties(v_first);
    end if;
    return coalesce(cardinality(v_gone), 0);
end;
$$;
