-- lock_budgets: lock budgets and return their running numbers
--
-- Every change of a budget holds this lock. An unknown budget gets a row, so that usage reported to it counts once it is
-- created.
-- Takes    p_ids: sorted, without duplicates; p_missing: some may be unknown.
-- Locks    the budgets, by id.
-- Returns  the newest row of each, in the order of p_ids; a budget without sound numbers raises.
create or replace function flowfabric.lock_budgets(p_ids uuid[], p_missing boolean) returns flowfabric.budget_head[]
language plpgsql as $$
declare
    v_id uuid;
    v_heads flowfabric.budget_head[];
begin
    if p_missing then
        -- One by one: a row that another transaction inserts now is locked in its turn.
        foreach v_id in array p_ids loop
            perform from flowfabric.budget b where b.id = v_id for no key update;
            if not found then
                insert into flowfabric.budget (id, name, updated_at) values (v_id, v_id::text, flowfabric.now())
                on conflict (id) do nothing;
                perform from flowfabric.budget b where b.id = v_id for no key update;
            end if;
        end loop;
    else
        perform from flowfabric.budget b where b.id = any (p_ids) order by b.id for no key update;
    end if;
    -- In a statement of its own, which sees what the transactions before wrote.
    select array_agg(coalesce(h.head, row(u.id, 0, null, 0, 0, 0, true, null, '{}', '{}', '{}', '{}', '{}', '{}', null,
                                          null)::flowfabric.budget_head) order by u.ord)
    into v_heads
    from unnest(p_ids) with ordinality as u (id, ord)
    left join lateral (select x as head from flowfabric.budget_head x where x.budget_id = u.id
                       order by x.seq desc limit 1) h on true
    where flowfabric.are_sound((h.head).dimensions, (h.head).used, (h.head).held, (h.head).overrun,
                               (h.head).hard, (h.head).soft)
          or not flowfabric.refuse_damaged(u.id);
    return v_heads;
end;
$$;

-- widen_head: the running numbers with further dimensions, which nothing has used yet.
create or replace function flowfabric.widen_head(p_head flowfabric.budget_head, p_dimensions text[])
returns flowfabric.budget_head
language plpgsql immutable as $$
declare
    v flowfabric.budget_head := p_head;
begin
    select array_agg(u.dim order by u.dim collate "C"), array_agg(p_head.used[u.place] order by u.dim collate "C"),
           array_agg(coalesce(p_head.held[u.place], 0) order by u.dim collate "C"),
           array_agg(coalesce(p_head.overrun[u.place], 0) order by u.dim collate "C"),
           array_agg(coalesce(p_head.hard[u.place], 0) order by u.dim collate "C"),
           array_agg(coalesce(p_head.soft[u.place], 0) order by u.dim collate "C")
    into v.dimensions, v.used, v.held, v.overrun, v.hard, v.soft
    from (select d.dim, array_position(p_head.dimensions, d.dim) as place
          from (select unnest(p_head.dimensions) union select unnest(p_dimensions)) as d (dim)) u;
    return v;
end;
$$;
