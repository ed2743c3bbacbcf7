-- use_budgets: report usage, reserve, settle and cancel, for many executions in one call
--
-- Called by the workers that hold the leases. See apply_usage.
-- Locks    the executions, by partition and id; then the budgets, by id.
-- Returns  one row per item.
-- Roles    work, operate
create or replace function flowfabric.use_budgets(
    p_op text[], p_partition integer[], p_id uuid[], p_lease uuid[], p_epoch bigint[], p_attempt uuid[], p_index integer[],
    p_key text[], p_name text[], p_n integer[], p_reservation uuid[], p_on_lost text[],
    p_budget_item integer[], p_budget uuid[], p_amount_item integer[], p_dimension text[], p_amount bigint[])
returns setof flowfabric.used
language plpgsql security definer as $$
declare
    v_used flowfabric.used;
begin
    perform flowfabric.require_read_committed();
    if cardinality(p_id) = 1 and (p_op is null or p_op = array['report']) and p_on_lost is null
       and (p_name is null or p_n[1] is not null and octet_length(p_name[1]) between 1 and 512)
       and cardinality(p_dimension) = cardinality(p_amount) and cardinality(p_dimension) = cardinality(p_amount_item)
       and cardinality(p_budget) = cardinality(p_budget_item) and 1 = all (p_amount_item) and 1 = all (p_budget_item) then
        v_used := flowfabric.report_one(
            p_partition[1], p_id[1], p_lease[1], p_epoch[1], p_attempt[1], p_index[1], p_key[1], p_name[1], p_n[1], p_budget,
            p_dimension, p_amount);
        if v_used.code is not null then
            return next v_used;
            return;
        end if;
    end if;
    if exists (select from unnest(p_op) as u (op) where u.op not in ('report', 'reserve', 'settle', 'cancel'))
       or exists (select from unnest(p_on_lost) as u (word) where u.word not in ('charge', 'release'))
       or exists (select from unnest(p_op, p_reservation) as u (op, id)
                  where u.op <> 'report' and u.id is null)
       or exists (select from unnest(p_name, p_n) as u (name, n)
                  where u.name is not null and (u.n is null or octet_length(u.name) not between 1 and 512)) then
        raise exception 'an unknown word, or a reservation without an id' using errcode = 'invalid_parameter_value';
    end if;
    return query select * from flowfabric.apply_usage(
        p_op, true, false, p_partition, p_id, p_lease, p_epoch, p_attempt, p_index, p_key, p_name, p_n, p_reservation,
        p_on_lost, p_budget_item, p_budget, p_amount_item, p_dimension, p_amount);
end;
$$;

-- report_one: count one report in the one budget it is for, if nothing else has to happen
--
-- The most common call, in as few statements as possible. It changes nothing and returns null where apply_usage has more
-- to do: a known key or place, a lease that does not hold, several budgets, a new dimension, a limit that is reached.
-- Locks    as apply_usage.
create or replace function flowfabric.report_one(
    p_partition integer, p_id uuid, p_lease uuid, p_epoch bigint, p_attempt uuid, p_index integer, p_key text, p_name text,
    p_n integer, p_budget uuid[], p_dimension text[], p_amount bigint[])
returns flowfabric.used
language plpgsql as $$
declare
    v_now timestamptz;
    v_until timestamptz; v_limits bigint; v_generation integer; v_run integer; v_index integer;
    v_budget uuid;
    v_budgets uuid[] := p_budget;
    -- the running numbers; in variables of their own, which are faster than the fields of a record
    v_seq bigint; v_breaches bigint; v_soft_breaches bigint; v_budget_generation integer; v_strict boolean; v_exhausted text;
    v_dims text[]; v_uses bigint[]; v_held bigint[]; v_overrun bigint[]; v_hard bigint[]; v_soft bigint[];
    v_breach_at timestamptz; v_breach_dim text;
    o flowfabric.used;
    k integer; v_used bigint; v_left jsonb;
begin
    for j in 1 .. cardinality(p_dimension) loop   -- apply_usage refuses these, sorts them and adds them up
        if p_amount[j] is null or p_amount[j] < 0 or p_dimension[j] is null or p_dimension[j] = ''
           or j > 1 and p_dimension[j] collate "C" <= p_dimension[j - 1] then
            return null;
        end if;
    end loop;
    select e.lease_expires_at, e.limits, e.generation, e.retries + e.replays, e.attempt_index
    into v_until, v_limits, v_generation, v_run, v_index
    from flowfabric.execution e
    where e.partition = p_partition and e.id = p_id and e.state = 'active' and e.lease_lost is null and e.lease_id = p_lease
      and e.epoch = p_epoch and e.attempt_id = p_attempt and (p_index is null or p_index = e.attempt_index)
    for no key update;
    if not found then
        return null;
    end if;
    if cardinality(v_budgets) = 0 then
        select l.budget_ids into v_budgets from flowfabric.limit_set l where l.digest = v_limits limit 1;
    end if;
    if v_budgets is null or cardinality(v_budgets) <> 1 then
        return null;
    end if;
    v_budget := v_budgets[1];
    perform from flowfabric.budget b where b.id = v_budget for no key update;
    if not found then
        return null;
    end if;
    -- In a statement of its own, which sees what the transactions before wrote.
    select x.seq + 1, x.breaches, x.soft_breaches, x.generation, x.is_strict, x.exhausted, x.dimensions, x.used, x.held,
           x.overrun, x.hard, x.soft, x.last_breach_at, x.last_breach_dim
    into v_seq, v_breaches, v_soft_breaches, v_budget_generation, v_strict, v_exhausted, v_dims, v_uses, v_held,
         v_overrun, v_hard, v_soft, v_breach_at, v_breach_dim
    from flowfabric.budget_head x where x.budget_id = v_budget order by x.seq desc limit 1;
    v_now := flowfabric.now();
    if v_seq is null or v_exhausted is not null or v_until <= v_now
       or flowfabric.are_sound(v_dims, v_uses, v_held, v_overrun, v_hard, v_soft) is not true
       or p_key <> '' and exists (select from flowfabric.budget_key s
                                  where s.budget_id = v_budget and s.key = p_key and s.expires_at > v_now)
       or p_name is not null and exists (select from flowfabric.step s
                                         where s.partition = p_partition and s.id = p_id and s.generation = v_generation
                                           and s.kind = 'usage' and s.name = p_name and s.n = p_n) then
        return null;
    end if;
    for j in 1 .. cardinality(p_dimension) loop
        k := array_position(v_dims, p_dimension[j]);
        if k is null then
            return null;
        end if;
        v_used := coalesce(v_uses[k], 0);
        if p_amount[j] > 9223372036854775807 - v_used - v_held[k] then
            return null;
        end if;
        v_used := v_used + p_amount[j];
        if v_hard[k] > 0 and v_used + v_held[k] >= v_hard[k] or v_soft[k] > 0 and v_used > v_soft[k] then
            return null;
        end if;
        v_uses[k] := v_used;
    end loop;

    insert into flowfabric.budget_head values
        (v_budget, v_seq, v_now, v_breaches, v_soft_breaches, v_budget_generation, v_strict, null, v_dims, v_uses, v_held,
         v_overrun, v_hard, v_soft, v_breach_at, v_breach_dim);
    if v_seq % 64 = 0 then   -- as write_heads does
        delete from flowfabric.budget_head x where x.budget_id = v_budget and x.seq between v_seq - 64 and v_seq - 1;
    end if;
    insert into flowfabric.budget_usage as was (partition, id, budget_id, dimension, amount)
    select p_partition, p_id, v_budget, u.dim, u.amount from unnest(p_dimension, p_amount) as u (dim, amount)
    on conflict (partition, id, budget_id, dimension)
    do update set amount = least(was.amount::numeric + excluded.amount, 9223372036854775807)::bigint;
    if p_key <> '' then
        insert into flowfabric.budget_key (budget_id, key, expires_at) values (v_budget, p_key, v_now + interval '24 hours')
        on conflict (budget_id, key) do update set expires_at = excluded.expires_at;
    end if;
    o.ordinal := 1;
    o.code := 'ok';
    o.left_dimensions := '{}'; o.left_amounts := '{}';
    if v_strict then
        for k in 1 .. cardinality(v_dims) loop
            continue when v_hard[k] = 0;
            o.left_dimensions := o.left_dimensions || v_dims[k];
            o.left_amounts := o.left_amounts || greatest(v_hard[k] - coalesce(v_uses[k], 0) - v_held[k], 0);
        end loop;
    end if;
    if p_name is not null then
        select coalesce(jsonb_object_agg(u.dim, u.amount), '{}') into v_left
        from unnest(o.left_dimensions, o.left_amounts) as u (dim, amount);
        insert into flowfabric.step (partition, id, generation, name, n, kind, run, attempt_index, result, recorded_at)
        values (p_partition, p_id, v_generation, p_name, p_n, 'usage', v_run, v_index, convert_to(v_left::text, 'utf8'), v_now)
        on conflict do nothing;
    end if;
    return o;
end;
$$;
