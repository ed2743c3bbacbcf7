-- update_budget: change a budget; usage and generation stay, and what it held back and may run now becomes claimable
--
-- Called by operators. A limit below what is used exhausts the budget. The end of the current period moves only if the
-- interval changes.
-- Takes    p_id; or p_owner instead: the execution or flow whose own budget it is.
--          p_hard_dimensions with p_hard, p_soft_dimensions with p_soft: limits to set, 0 for none; p_add_dimensions with
--          p_add: what to add to hard limits, or to take away. Null: unchanged. p_defined_at: change it only if its
--          definition is still the one of that time; null: whatever it is.
-- Locks    the budget; then what it holds back, skipping what is locked.
-- Returns  ok and the budget, not_found, stale if its definition has changed, or limit with the dimension that would have a limit below 0 or beyond 2^63 - 1, or none to add to.
-- Roles    operate
create or replace function flowfabric.update_budget(
    p_id uuid, p_hard_dimensions text[], p_hard bigint[], p_soft_dimensions text[], p_soft bigint[],
    p_add_dimensions text[], p_add bigint[], p_mode text, p_on_hard text, p_on_soft text, p_interval_ms bigint,
    p_defined_at timestamptz, p_owner uuid)
returns table (code text, dimension text, status flowfabric.budget_view)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_before flowfabric.budget_head[];
    h flowfabric.budget_head;
    d flowfabric.budget;
    v_dims text[];
    v_bound numeric;
    k integer; p integer;
begin
    perform flowfabric.require_read_committed();
    perform flowfabric.check_budget('', '', '', coalesce(p_mode, 'strict'), p_on_hard, p_on_soft, coalesce(p_interval_ms, 0),
                                    p_hard_dimensions, p_hard, null);
    perform flowfabric.check_budget('', '', '', 'strict', '', '', 0, p_soft_dimensions, p_soft, null);
    perform flowfabric.check_budget('', '', '', 'strict', '', '', 0, p_add_dimensions, null, null);
    if p_id is null then
        select b.id into p_id from flowfabric.budget b where b.owner_id = p_owner and b.created_at is not null
        order by b.name limit 1;
        if not found then
            code := 'not_found';
            return next;
            return;
        end if;
    end if;
    v_before := flowfabric.lock_budgets(array[p_id], false);
    v_now := flowfabric.now();
    select b.* into d from flowfabric.budget b where b.id = p_id and b.created_at is not null;
    if not found then
        code := 'not_found';
        return next;
        return;
    end if;
    if d.updated_at <> p_defined_at then
        code := 'stale';
        return next;
        return;
    end if;
    v_dims := coalesce(p_hard_dimensions, '{}') || coalesce(p_soft_dimensions, '{}') || coalesce(p_add_dimensions, '{}');
    h := v_before[1];
    if not h.dimensions @> v_dims then
        h := flowfabric.widen_head(h, v_dims);
    end if;
    for k in 1 .. cardinality(h.dimensions) loop
        p := array_position(p_hard_dimensions, h.dimensions[k]);
        if p is not null then
            h.hard[k] := p_hard[p];
        end if;
        p := array_position(p_soft_dimensions, h.dimensions[k]);
        if p is not null then
            h.soft[k] := p_soft[p];
        end if;
        p := array_position(p_add_dimensions, h.dimensions[k]);
        if p is not null then
            v_bound := h.hard[k]::numeric + p_add[p];
            if h.hard[k] = 0 or v_bound < 1 or v_bound > 9223372036854775807 then
                code := 'limit'; dimension := h.dimensions[k];
                return next;
                return;
            end if;
            h.hard[k] := v_bound::bigint;
        end if;
    end loop;
    h.is_strict := coalesce(p_mode, d.mode) = 'strict';
    update flowfabric.budget b
    set mode = coalesce(p_mode, b.mode), on_hard_limit = coalesce(p_on_hard, b.on_hard_limit),
        on_soft_limit = coalesce(p_on_soft, b.on_soft_limit),
        reset_interval = case when p_interval_ms is null then b.reset_interval
                              when p_interval_ms > 0 then flowfabric.ms(p_interval_ms) end,
        next_reset_at = case when p_interval_ms is null or flowfabric.ms(p_interval_ms) = b.reset_interval then b.next_reset_at
                             when p_interval_ms > 0 then v_now + flowfabric.ms(p_interval_ms) end,
        dimensions = q.dims, hard = q.hard, soft = q.soft, updated_at = v_now, is_lowered = flowfabric.is_beyond(h)
    from (select coalesce(array_agg(u.dim order by u.ord), '{}') as dims, coalesce(array_agg(u.hard order by u.ord), '{}') as hard,
                 coalesce(array_agg(u.soft order by u.ord), '{}') as soft
          from unnest(h.dimensions, h.hard, h.soft) with ordinality as u (dim, hard, soft, ord)
          where u.dim = any (d.dimensions) or u.dim = any (v_dims)) q
    where b.id = p_id;
    perform flowfabric.write_heads(v_before, array[h], array[1], v_now);
    perform flowfabric.log_budget(p_id, 'budget_changed', jsonb_strip_nulls(jsonb_build_object(
        'hard', (select jsonb_object_agg(u.dim, u.hard) from unnest(h.dimensions, h.hard) as u (dim, hard) where u.hard > 0),
        'soft', (select jsonb_object_agg(u.dim, u.soft) from unnest(h.dimensions, h.soft) as u (dim, soft) where u.soft > 0),
        'enforcement_mode', p_mode)), v_now);
    perform flowfabric.open_budgets(array[p_id], v_now);
    if p_interval_ms > 0 then
        perform flowfabric.wake_duties(v_now + flowfabric.ms(p_interval_ms));
    end if;
    code := 'ok';
    select v.* into status from flowfabric.budget_view v where v.id = p_id;
    return next;
end;
$$;

-- log_budget: an event about a budget, in the operator family.
create or replace function flowfabric.log_budget(p_id uuid, p_type text, p_details jsonb, p_now timestamptz) returns void
language plpgsql as $$
declare
    v_slot smallint := flowfabric.open_log(p_now);
begin
    insert into flowfabric.event (slot, occurred_at, partition, operator_type, details)
    select v_slot, p_now, 0, p_type, jsonb_build_object('budget_id', b.id, 'name', b.name) || p_details
    from flowfabric.budget b where b.id = p_id;
end;
$$;
