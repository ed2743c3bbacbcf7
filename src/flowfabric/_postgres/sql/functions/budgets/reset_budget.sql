-- reset_budget: begin a new generation: nothing is used; reservations stay held
--
-- A damaged budget is sound again: its limits are those of its definition, and what is held those of its reservations.
-- Called by operators; reset_due_budgets does the same for the duty.
-- Locks    the budget; then what it holds back, skipping what is locked.
-- Returns  ok and the time of the next reset, or not_found.
-- Roles    operate
create or replace function flowfabric.reset_budget(p_id uuid) returns table (code text, next_reset_at timestamptz)
language plpgsql security definer as $$
#variable_conflict use_column
begin
    perform flowfabric.require_read_committed();
    code := flowfabric.begin_period(p_id, false);
    select b.next_reset_at into next_reset_at from flowfabric.budget b where b.id = p_id;
    return next;
end;
$$;

-- begin_period: lock a budget and begin a new generation. p_due: only if it is due, which a manual reset may have changed.
create or replace function flowfabric.begin_period(p_id uuid, p_due boolean) returns text
language plpgsql as $$
declare
    v_now timestamptz;
    v_before flowfabric.budget_head[];
    h flowfabric.budget_head;
    d flowfabric.budget;
    k integer;
begin
    perform from flowfabric.budget b where b.id = p_id for no key update;
    v_now := flowfabric.now();
    select b.* into d from flowfabric.budget b where b.id = p_id and b.created_at is not null;
    if not found then
        return 'not_found';
    elsif p_due and (d.next_reset_at is null or d.next_reset_at > v_now) then
        return 'early';
    end if;
    if flowfabric.is_damaged(p_id) then
        perform flowfabric.rebuild_head(p_id);
    end if;
    v_before := flowfabric.lock_budgets(array[p_id], false);
    h := v_before[1];
    for k in 1 .. cardinality(h.dimensions) loop
        h.used[k] := case when h.used[k] is not null then 0 end;
        h.overrun[k] := 0;
    end loop;
    h.generation := d.generation + 1; h.last_breach_at := null; h.last_breach_dim := null;
    update flowfabric.budget b
    set generation = b.generation + 1, reset_count = b.reset_count + 1, last_reset_at = v_now,
        next_reset_at = v_now + b.reset_interval, is_lowered = flowfabric.is_beyond(h)
    where b.id = p_id;
    perform flowfabric.write_heads(v_before, array[h], array[1], v_now);
    perform flowfabric.log_budget(p_id, 'budget_reset', jsonb_build_object('generation', h.generation), v_now);
    perform flowfabric.open_budgets(array[p_id], v_now);
    return 'ok';
end;
$$;

-- rebuild_head: running numbers for a damaged budget, whose use is unknown; breaches stay counted. Called under its lock.
create or replace function flowfabric.rebuild_head(p_id uuid) returns void
language plpgsql as $$
declare
    v_seq bigint; v_breaches bigint; v_soft_breaches bigint;
begin
    with gone as (
        delete from flowfabric.budget_head h where h.budget_id = p_id returning h.seq, h.breaches, h.soft_breaches
    )
    select coalesce(max(g.seq), 0), coalesce(max(g.breaches), 0), coalesce(max(g.soft_breaches), 0)
    into v_seq, v_breaches, v_soft_breaches from gone g;
    insert into flowfabric.budget_head
        (budget_id, seq, at, breaches, soft_breaches, generation, is_strict, dimensions, used, held, overrun, hard, soft)
    select b.id, v_seq + 1, flowfabric.now(), v_breaches, v_soft_breaches, b.generation, b.mode = 'strict', n.dimensions, n.used,
           n.held, n.overrun, n.hard, n.soft
    from flowfabric.budget b
    cross join lateral (
        select coalesce(array_agg(d.dim order by d.dim), '{}') as dimensions,
               coalesce(array_agg(null::bigint), '{}') as used,
               coalesce(array_agg(d.held order by d.dim), '{}') as held,
               coalesce(array_agg(0::bigint), '{}') as overrun,
               coalesce(array_agg(d.hard order by d.dim), '{}') as hard,
               coalesce(array_agg(d.soft order by d.dim), '{}') as soft
        from (select u.dim collate "C" as dim, least(sum(u.held), 9223372036854775807)::bigint as held,
                     sum(u.hard)::bigint as hard, sum(u.soft)::bigint as soft
              from (select o.dim, 0::bigint as held, o.hard, o.soft
                    from unnest(b.dimensions, b.hard, b.soft) as o (dim, hard, soft)
                    union all
                    select a.dim, a.amount, 0, 0
                    from flowfabric.reservation r cross join lateral unnest(r.dimensions, r.amounts) as a (dim, amount)
                    where r.budget_id = b.id and r.state = 'held') u
              group by 1) d) n
    where b.id = p_id;
end;
$$;
