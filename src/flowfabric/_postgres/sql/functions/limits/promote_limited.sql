-- promote_limited: rate_limited -> claimable, for up to p_count executions (at most 1,000) that a limit holds, best rank first
--
-- Called by whatever opens the limit, which holds its lock. Executions that are locked are left for the duty, and those that
-- wait for amounts which a budget does not have. Wakes workers, and the duty if more are left.
-- Takes    p_key: of a quota policy; null: a budget.
-- Locks    executions, skipping locked ones.
-- Returns  how many became claimable.
create or replace function flowfabric.promote_limited(p_limit uuid, p_key text, p_count integer, p_now timestamptz)
returns integer
language plpgsql as $$
declare
    v_key text := coalesce(p_key, '');
    v_most integer := least(p_count, 1000);
    v_tids tid[]; v_partitions integer[]; v_ids uuid[]; v_gone uuid[];
begin
    if v_most <= 0 then
        return 0;
    end if;
    select array_agg(x.tid), array_agg(x.partition), array_agg(x.id) into v_tids, v_partitions, v_ids
    from (select b.ctid as tid, b.partition, b.id
          from flowfabric.blocked b
          cross join lateral (select y.ctid as tid from flowfabric.execution y
                              where y.partition = b.partition and y.id = b.id offset 0) f
          join flowfabric.execution e on e.ctid = f.tid
          where b.limit_id = p_limit and b.limit_key = v_key and e.state = 'rate_limited'
            and (b.needs is null or flowfabric.budgets_cover(
                     (select l.budget_ids from flowfabric.limit_set l where l.digest = e.limits limit 1), b.needs))
          order by b.rank, b.created_at, b.id limit v_most
          for no key update of e skip locked) x;
    if v_ids is not null then
        with gone as (
            delete from flowfabric.blocked b where b.ctid = any (v_tids) and b.id = any (v_ids) returning b.id
        )
        select array_agg(g.id) into v_gone from gone g;
        if v_gone is not null then
            with promoted as (
                update flowfabric.execution e
                set state = case when e.resume_pending then 'resumable' else 'waiting' end, blocking_reason = 'waiting_for_worker',
                    blocking_detail = null, transitioned_at = p_now, mutated_at = null
                from unnest(v_partitions, v_ids) as u (partition, id)
                where e.partition = u.partition and e.id = u.id and u.id = any (v_gone)
                returning e.partition, e.id
            )
            select array_agg(p.partition), array_agg(p.id) into v_partitions, v_ids from promoted p;
            perform flowfabric.make_ready(v_partitions, v_ids, null);
        end if;
    end if;
    -- A page that is full, or rows that were locked: the duty continues.
    if (p_count >= 1000 or coalesce(cardinality(v_gone), 0) < v_most)
       and exists (select from flowfabric.blocked b where b.limit_id = p_limit and b.limit_key = v_key and b.needs is null) then
        perform flowfabric.look_at_limit(
            p_limit, v_key, case when cardinality(v_gone) >= 1000 then p_now else p_now + interval '1 second' end, p_now);
    end if;
    return coalesce(cardinality(v_gone), 0);
end;
$$;

-- look_at_limit: have the duty look at a limit at a time, if it will not before.
create or replace function flowfabric.look_at_limit(p_limit uuid, p_key text, p_due timestamptz, p_now timestamptz) returns void
language plpgsql as $$
begin
    insert into flowfabric.limit_due (due_at, limit_id, key)
    select p_due, p_limit, p_key
    where not exists (select from flowfabric.limit_due x where x.limit_id = p_limit and x.key = p_key and x.due_at between p_now and p_due);
    if found then
        perform flowfabric.wake_duties(p_due);
    end if;
end;
$$;

-- open_limit: promote what a limit has room for now
--
-- Called by the duty, and by whatever made room. A rate is looked at again when its window has room.
-- Takes    p_most: no more than that. p_wait: false: give up if the policy is locked.
-- Locks    the head of the policy; a budget is only read.
-- Returns  how many became claimable; null: the policy is locked.
create or replace function flowfabric.open_limit(p_limit uuid, p_key text, p_most integer, p_wait boolean) returns integer
language plpgsql as $$
declare
    v_now timestamptz;
    v_room flowfabric.quota_room;
    v_left bigint := 1000;
    v_promoted integer;
begin
    if p_key = '' then
        if exists (select from flowfabric.exhausted_budgets(array[p_limit])) then
            return 0;
        end if;
        return flowfabric.promote_limited(p_limit, p_key, least(p_most, 1000), flowfabric.now());
    end if;
    if not (flowfabric.lock_heads(array[p_limit], array[p_key], case when p_wait then 'wait' else 'skip' end))[1] then
        return null;
    end if;
    v_now := flowfabric.now();
    select r.* into v_room from flowfabric.quota_rooms(array[p_limit], array[p_key], p_most, true, v_now) r;
    if found then
        v_left := least(case when v_room.rate > 0 then v_room.rate_left end,
                        case when v_room.cap > 0 then v_room.slots_left end);
    end if;
    v_promoted := flowfabric.promote_limited(p_limit, p_key, least(v_left, p_most, 1000)::integer, v_now);
    if v_room.rate > 0 and v_left - v_promoted <= 0
       and exists (select from flowfabric.blocked b where b.limit_id = p_limit and b.limit_key = p_key) then
        -- Not for every entry of a window that was filled at once.
        perform flowfabric.look_at_limit(
            p_limit, p_key, greatest(coalesce(v_room.retry_at, v_now), v_now + interval '50 milliseconds'), v_now);
    end if;
    return v_promoted;
end;
$$;
