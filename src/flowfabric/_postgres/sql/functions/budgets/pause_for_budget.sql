-- pause_for_budget: active -> rate_limited, until every budget has room for what the execution needs
--
-- Called by the lease holder, which gives the lease back; the same attempt continues. If there is room now, nothing changes.
-- Takes    the fence; p_dimensions with p_amounts: what it needs; p_budgets: of these budgets, null: of those it has.
-- Locks    the execution; then the budgets, by id, shared: none opens before the execution waits for it.
-- Returns  one verdict: ok; covered, and the lease stays; or the reason it was refused.
-- Roles    work, operate
create or replace function flowfabric.pause_for_budget(
    p_partition integer, p_id uuid, p_lease uuid, p_epoch bigint, p_attempt uuid, p_index integer, p_dimensions text[],
    p_amounts bigint[], p_budgets uuid[])
returns setof flowfabric.verdict
language plpgsql security definer as $$
declare
    v_held flowfabric.verdict;
    e flowfabric.execution;
    v_own uuid[];
    v_needs jsonb;
    v_budget uuid;
    v_detail text;
    v_now timestamptz;
    v_slot smallint;
begin
    perform flowfabric.require_read_committed();
    if cardinality(p_dimensions) <> cardinality(p_amounts) or exists (
            select from unnest(p_dimensions, p_amounts) as u (dim, amount)
            where u.dim is null or u.amount is null or u.amount < 0 or octet_length(u.dim) not between 1 and 256) then
        raise exception 'amounts are a dimension and a number from 0 on each' using errcode = 'invalid_parameter_value';
    end if;
    v_held := flowfabric.hold_one(p_partition, p_id, p_lease, p_epoch, p_attempt, p_index);
    if v_held.code is not null then
        return next v_held;
        return;
    end if;
    select x.* into e from flowfabric.execution x where x.partition = p_partition and x.id = p_id;
    v_own := coalesce(flowfabric.budgets_of(e), '{}');
    v_needs := jsonb_strip_nulls(jsonb_build_object(
        'amounts', coalesce((select jsonb_object_agg(u.dim, u.amount) from unnest(p_dimensions, p_amounts) as u (dim, amount)), '{}'),
        'budgets', case when p_budgets is not null then to_jsonb(p_budgets) end));
    perform flowfabric.hold_budgets(v_own || coalesce(p_budgets, '{}'), true);
    v_now := flowfabric.now();
    if e.lease_expires_at <= v_now then   -- while this call waited for a budget
        return next flowfabric.hold_one(p_partition, p_id, p_lease, p_epoch, p_attempt, p_index);
        return;
    end if;
    v_budget := flowfabric.denying_budget(v_own, v_needs);
    if v_budget is null then
        return query select 1, 'covered', null::text, e.state, e.epoch, e.attempt_id, v_now;
        return;
    end if;
    -- It will hold again what the pause gives back: otherwise that alone would let it continue, to the same pause.
    v_needs := v_needs || coalesce((
        select jsonb_build_object('held', jsonb_object_agg(q.budget_id, q.amounts))
        from (select s.budget_id, jsonb_object_agg(s.dim, s.amount) as amounts
              from (select r.budget_id, u.dim, sum(u.amount) as amount
                    from (select x.* from flowfabric.reservation x where x.partition = p_partition and x.id = p_id offset 0) r
                    cross join lateral unnest(r.dimensions, r.amounts) as u (dim, amount)
                    where e.has_reserved and r.state = 'held' and r.lost is null and u.dim = any (p_dimensions)
                    group by 1, 2) s
              group by 1) q
        having count(*) > 0), '{}');
    select format('budget %s: %s', v_budget, string_agg(format('%s %s/%s', u.dim, coalesce(u.used, 0), u.hard), ', ' order by u.dim))
    into v_detail
    from (select x.* from flowfabric.budget_head x where x.budget_id = v_budget order by x.seq desc limit 1) h
    cross join lateral unnest(h.dimensions, h.used, h.hard) as u (dim, used, hard)
    where u.hard > 0 and (u.dim = any (p_dimensions) or u.used >= u.hard);
    v_slot := flowfabric.open_log(v_now);
    with paused as (
        update flowfabric.execution x
        set state = 'rate_limited', pending = 'interrupted', blocking_reason = 'waiting_for_budget', blocking_detail = v_detail,
            attempt_suspended_at = v_now,
            attempt_timeout_left = case when x.attempt_timeout_at is not null
                then greatest(x.attempt_timeout_at - v_now, interval '1 millisecond') end,
            attempt_timeout_at = null, transitioned_at = v_now, mutated_at = null
        where x.partition = p_partition and x.id = p_id
        returning x.*
    ), listed as (
        insert into flowfabric.blocked
            (blocking_reason, created_at, id, partition, rank, limit_id, limit_key, blocked_at, needs)
        select p.blocking_reason, p.created_at, p.id, p.partition, flowfabric.rank_of(p.priority), v_budget, '', v_now, v_needs
        from paused p
    )
    insert into flowfabric.event
        (slot, route, occurred_at, partition, id, flow_id, namespace, tags, lease_type, lease_id, lease_epoch, attempt_id,
         attempt_index, worker, reason, revoked_by)
    select v_slot, p.route, v_now, p.partition, p.id, p.flow_id, p.namespace, p.tags, 'revoked', p.lease_id, p.epoch,
           p.attempt_id, p.attempt_index, p.worker, 'waiting_for_budget', 'backend'
    from paused p;
    if e.limits is not null then
        perform flowfabric.give_slots(array[p_partition], array[p_id], false, v_now);
    end if;
    if e.has_reserved then
        perform flowfabric.end_reservations(array[p_partition], array[p_id], false, v_now);
    end if;
    insert into flowfabric.flow_touched select e.partition, e.flow_id where e.flow_id is not null;
    return query select 1, 'ok', null::text, 'rate_limited', null::bigint, null::uuid, v_now;
end;
$$;
