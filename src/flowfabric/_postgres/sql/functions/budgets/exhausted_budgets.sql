-- exhausted_budgets: which of these budgets are exhausted, each with the first dimension whose hard limit is reached
--
-- Called by claims. Reservations do not exhaust a budget. Reads one row per budget, by its key, and locks nothing. A
-- budget that does not exist limits nothing; under one that exists without sound numbers (damaged) nothing is admitted.
create or replace function flowfabric.exhausted_budgets(p_ids uuid[])
returns table (budget_id uuid, dimension text, used bigint, hard bigint, damaged boolean)
language sql stable as $$
    select u.id, h.exhausted, h.used[array_position(h.dimensions, h.exhausted)],
           h.hard[array_position(h.dimensions, h.exhausted)],
           flowfabric.are_sound(h.dimensions, h.used, h.held, h.overrun, h.hard, h.soft) is not true
    from unnest(p_ids) as u (id)
    left join lateral (select x.* from flowfabric.budget_head x where x.budget_id = u.id order by x.seq desc limit 1) h on true
    where case when flowfabric.are_sound(h.dimensions, h.used, h.held, h.overrun, h.hard, h.soft)
               then h.exhausted is not null else flowfabric.is_damaged(u.id) end
$$;

-- are_sound: whether the running numbers of a budget have an element per dimension, none of them negative; null without numbers.
create or replace function flowfabric.are_sound(
    p_dimensions text[], p_used bigint[], p_held bigint[], p_overrun bigint[], p_hard bigint[], p_soft bigint[])
returns boolean
language sql immutable as $$
    select cardinality(p_used) = cardinality(p_dimensions) and cardinality(p_held) = cardinality(p_dimensions)
       and cardinality(p_overrun) = cardinality(p_dimensions) and cardinality(p_hard) = cardinality(p_dimensions)
       and cardinality(p_soft) = cardinality(p_dimensions)
       and (0 > any (p_used)) is not true and 0 <= all (p_held) and 0 <= all (p_overrun)
       and 0 <= all (p_hard) and 0 <= all (p_soft)
$$;

-- is_damaged: whether a budget was created and has no sound numbers; one that was only reported to needs none.
create or replace function flowfabric.is_damaged(p_id uuid) returns boolean
language sql stable as $$
    select case when h.budget_id is null
                then exists (select from flowfabric.budget b where b.id = p_id and b.created_at is not null)
                else flowfabric.are_sound(h.dimensions, h.used, h.held, h.overrun, h.hard, h.soft) is not true end
    from (select p_id as id) u
    left join lateral (select x.* from flowfabric.budget_head x where x.budget_id = u.id order by x.seq desc limit 1) h on true
$$;

-- refuse_damaged: raise if a budget is damaged; returns false otherwise. It reads what its caller's statement sees.
create or replace function flowfabric.refuse_damaged(p_id uuid) returns boolean
language plpgsql stable as $$
begin
    if flowfabric.is_damaged(p_id) then
        perform flowfabric.corrupt(flowfabric.budget_damage(p_id));
    end if;
    return false;
end;
$$;

-- hold_budgets: lock budgets in a way that excludes their opening (a reset, a raise, a release) until this transaction ends
--
-- Called before executions are moved aside under them. In the order of their ids.
-- Takes    p_wait: false: leave out those that are locked.
-- Returns  those that are locked now.
create or replace function flowfabric.hold_budgets(p_ids uuid[], p_wait boolean) returns uuid[]
language plpgsql as $$
declare
    v_ids uuid[];
begin
    if p_wait then
        with held as materialized (
            select b.id from flowfabric.budget b where b.id = any (p_ids) order by b.id for share
        )
        select array_agg(h.id) into v_ids from held h;
    else
        with held as materialized (
            select b.id from flowfabric.budget b where b.id = any (p_ids) order by b.id for share skip locked
        )
        select array_agg(h.id) into v_ids from held h;
    end if;
    return coalesce(v_ids, '{}');
end;
$$;

-- budgets_cover: whether budgets have room for the amounts that a paused execution needs.
--
-- Takes    p_ids: the budgets of the execution; p_needs: the amounts by dimension, and the budgets if they are others.
create or replace function flowfabric.budgets_cover(p_ids uuid[], p_needs jsonb) returns boolean
language sql stable as $$ select flowfabric.denying_budget(p_ids, p_needs) is null $$;

-- denying_budget: the first budget, by id, that is exhausted or has no room for these amounts, and for what the execution held
-- of it before its pause; null: none. A damaged one has no room.
create or replace function flowfabric.denying_budget(p_ids uuid[], p_needs jsonb) returns uuid
language sql stable as $$
    select u.id
    from (select i.id, true as is_own from unnest(p_ids) as i (id)
          union
          select i.id::uuid, false from jsonb_array_elements_text(p_needs -> 'budgets') as i (id)) u
    left join lateral (select x.* from flowfabric.budget_head x where x.budget_id = u.id order by x.seq desc limit 1) h on true
    where flowfabric.are_sound(h.dimensions, h.used, h.held, h.overrun, h.hard, h.soft) is not true
              and flowfabric.is_damaged(u.id)
       or u.is_own and h.exhausted is not null
       or (not u.is_own or p_needs -> 'budgets' is null) and h.is_strict and exists (
           select from jsonb_each_text(p_needs -> 'amounts') as n (dim, amount)
           cross join lateral (select array_position(h.dimensions, n.dim) as place) k
           where h.hard[k.place] > 0
             and n.amount::numeric + coalesce((p_needs -> 'held' -> u.id::text ->> n.dim)::numeric, 0)
                 > h.hard[k.place]::numeric - coalesce(h.used[k.place], 0) - h.held[k.place])
    order by u.id limit 1
$$;
