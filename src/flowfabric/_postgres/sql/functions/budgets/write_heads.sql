-- write_heads: store changed running numbers of budgets, and write an event for each limit they crossed
--
-- Called under the locks of the budgets.
-- Takes    p_before and p_after: the numbers; p_changed: the positions of those that changed.
create or replace function flowfabric.write_heads(
    p_before flowfabric.budget_head[], p_after flowfabric.budget_head[], p_changed integer[], p_now timestamptz)
returns void
language plpgsql as $$
declare
    b flowfabric.budget_head;
    h flowfabric.budget_head;
    v_new flowfabric.budget_head[] := '{}';
    v_old bigint;
    v_ids uuid[] := '{}'; v_types text[] := '{}'; v_dims text[] := '{}'; v_used bigint[] := '{}'; v_bounds bigint[] := '{}';
    v_slot smallint;
    i integer; k integer; v_at integer;
begin
    foreach i in array p_changed loop
        b := p_before[i];
        h := p_after[i];
        h.seq := b.seq + 1;
        h.at := p_now;
        h.exhausted := null;
        for k in 1 .. cardinality(h.dimensions) loop
            if h.used[k] >= h.hard[k] and h.hard[k] > 0 and h.is_strict then
                h.exhausted := h.dimensions[k];
                v_at := k;
                exit;
            end if;
        end loop;
        v_new := v_new || h;
        if h.exhausted is not null and b.exhausted is null then
            v_ids := v_ids || h.budget_id; v_types := v_types || text 'budget_exhausted';
            v_dims := v_dims || h.exhausted; v_used := v_used || h.used[v_at]; v_bounds := v_bounds || h.hard[v_at];
        elsif h.exhausted is null and b.exhausted is not null then
            k := array_position(h.dimensions, b.exhausted);
            v_ids := v_ids || h.budget_id; v_types := v_types || text 'budget_reopened';
            v_dims := v_dims || b.exhausted; v_used := v_used || h.used[k]; v_bounds := v_bounds || h.hard[k];
        end if;
        for k in 1 .. cardinality(h.dimensions) loop
            continue when h.used[k] is null or (h.soft[k] = 0 and (h.is_strict or h.hard[k] = 0));
            v_old := coalesce(b.used[array_position(b.dimensions, h.dimensions[k])], 0);
            if h.soft[k] > 0 and v_old <= h.soft[k] and h.used[k] > h.soft[k] then
                v_ids := v_ids || h.budget_id; v_types := v_types || text 'budget_soft_limit_reached';
                v_dims := v_dims || h.dimensions[k]; v_used := v_used || h.used[k]; v_bounds := v_bounds || h.soft[k];
            elsif not h.is_strict and h.hard[k] > 0 and v_old <= h.hard[k] and h.used[k] > h.hard[k] then
                v_ids := v_ids || h.budget_id; v_types := v_types || text 'budget_soft_limit_reached';
                v_dims := v_dims || h.dimensions[k]; v_used := v_used || h.used[k]; v_bounds := v_bounds || h.hard[k];
            end if;
        end loop;
        if h.seq % 64 = 0 then   -- rows before these are gone already
            delete from flowfabric.budget_head o where o.budget_id = h.budget_id and o.seq between h.seq - 64 and h.seq - 1;
        end if;
    end loop;
    if cardinality(v_new) = 1 then
        insert into flowfabric.budget_head values (h.*);
    else
        insert into flowfabric.budget_head select n.* from unnest(v_new) as n;
    end if;
    if cardinality(v_ids) > 0 then
        v_slot := flowfabric.open_log(p_now);
        insert into flowfabric.event (slot, occurred_at, partition, operator_type, details)
        select v_slot, p_now, 0, e.type,
               jsonb_build_object('budget_id', e.id, 'name', d.name, 'dimension', e.dim, 'usage', e.used, 'limit', e.bound)
        from unnest(v_ids, v_types, v_dims, v_used, v_bounds) with ordinality as e (id, type, dim, used, bound, ord)
        join flowfabric.budget d on d.id = e.id
        order by e.ord;
    end if;
end;
$$;
