-- The results of reports, reservations and settlements, from the running numbers after them.

-- soft_breach: the result of a call that was counted: ok, or the first of its dimensions that is above a soft limit.
create or replace function flowfabric.soft_breach(
    p_used flowfabric.used, p_heads flowfabric.budget_head[], p_budgets integer[], p_dimensions text[])
returns flowfabric.used
language plpgsql immutable as $$
declare
    o flowfabric.used := p_used;
    h flowfabric.budget_head;
    b integer; k integer; v_dim text;
begin
    o.code := 'ok';
    foreach b in array coalesce(p_budgets, '{}') loop
        h := p_heads[b];
        foreach v_dim in array coalesce(p_dimensions, '{}') loop
            k := array_position(h.dimensions, v_dim);
            if h.soft[k] > 0 and h.used[k] > h.soft[k] or not h.is_strict and h.hard[k] > 0 and h.used[k] > h.hard[k] then
                o.code := 'soft'; o.budget_id := h.budget_id; o.dimension := v_dim; o.current := h.used[k];
                o.bound := case when h.soft[k] > 0 and h.used[k] > h.soft[k] then h.soft[k] else h.hard[k] end;
                return o;
            end if;
        end loop;
    end loop;
    return o;
end;
$$;

-- count_soft: the running numbers after a call that is above soft limits: each of its budgets counts it once.
create or replace function flowfabric.count_soft(
    p_used flowfabric.used, p_heads flowfabric.budget_head[], p_budgets integer[], p_dimensions text[])
returns flowfabric.budget_head[]
language plpgsql immutable as $$
declare
    b integer;
begin
    if p_used.code = 'soft' then
        foreach b in array p_budgets loop
            if (flowfabric.soft_breach(null, p_heads, array[b], p_dimensions)).code = 'soft' then
                p_heads[b].soft_breaches := (p_heads[b]).soft_breaches + 1;
            end if;
        end loop;
    end if;
    return p_heads;
end;
$$;

-- with_remaining: a result with what is left of each dimension that budgets limit: the least of them.
create or replace function flowfabric.with_remaining(
    p_used flowfabric.used, p_heads flowfabric.budget_head[], p_budgets integer[])
returns flowfabric.used
language plpgsql immutable as $$
declare
    o flowfabric.used := p_used;
    h flowfabric.budget_head;
    b integer; k integer; p integer; v_left bigint;
begin
    o.left_dimensions := '{}'; o.left_amounts := '{}';
    foreach b in array coalesce(p_budgets, '{}') loop
        h := p_heads[b];
        continue when not h.is_strict;
        for k in 1 .. cardinality(h.dimensions) loop
            continue when h.hard[k] = 0;
            v_left := greatest(h.hard[k] - coalesce(h.used[k], 0) - h.held[k], 0);
            p := array_position(o.left_dimensions, h.dimensions[k]);
            if p is null then
                o.left_dimensions := o.left_dimensions || h.dimensions[k];
                o.left_amounts := o.left_amounts || v_left;
            elsif v_left < o.left_amounts[p] then
                o.left_amounts[p] := v_left;
            end if;
        end loop;
    end loop;
    return o;
end;
$$;
