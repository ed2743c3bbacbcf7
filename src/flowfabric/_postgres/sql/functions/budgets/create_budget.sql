-- create_budget: define a budget; one that exists does not change
--
-- Usage that was reported before counts. A definition below it is possible, and the budget is then exhausted.
-- Takes    p_dimensions, p_hard, p_soft: one entry per dimension; 0 is no limit. p_interval_ms: 0 for no periodic reset.
--          p_owner_partition, p_owner: the execution or flow with which it is purged; null for none.
-- Locks    the budget.
-- Returns  created or exists, and its id.
-- Roles    work, operate
create or replace function flowfabric.create_budget(
    p_id uuid, p_name text, p_scope_type text, p_scope_id text, p_mode text, p_on_hard text, p_on_soft text,
    p_interval_ms bigint, p_dimensions text[], p_hard bigint[], p_soft bigint[], p_owner_partition integer, p_owner uuid)
returns table (code text, id uuid)
language plpgsql security definer as $$
#variable_conflict use_column
begin
    perform flowfabric.require_read_committed();
    return query select * from flowfabric.define_budget(
        p_id, p_name, p_scope_type, p_scope_id, p_mode, p_on_hard, p_on_soft, p_interval_ms, p_dimensions, p_hard, p_soft,
        p_owner_partition, p_owner);
end;
$$;

-- define_budget: the same for other functions.
create or replace function flowfabric.define_budget(
    p_id uuid, p_name text, p_scope_type text, p_scope_id text, p_mode text, p_on_hard text, p_on_soft text,
    p_interval_ms bigint, p_dimensions text[], p_hard bigint[], p_soft bigint[], p_owner_partition integer, p_owner uuid)
returns table (code text, id uuid)
language plpgsql as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_before flowfabric.budget_head[];
    h flowfabric.budget_head;
begin
    perform flowfabric.check_budget(p_name, p_scope_type, p_scope_id, p_mode, p_on_hard, p_on_soft, p_interval_ms,
                                    p_dimensions, p_hard, p_soft);
    if cardinality(p_hard) <> cardinality(p_dimensions) or cardinality(p_soft) <> cardinality(p_dimensions)
       or p_name is null or p_name ~ '^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$' and p_name <> p_id::text then
        raise exception 'the lists of a budget have one entry per dimension; a name is no UUID'
            using errcode = 'invalid_parameter_value';
    end if;
    insert into flowfabric.budget (id, name, updated_at) values (p_id, p_name, flowfabric.now()) on conflict do nothing;
    if not found then
        select b.id into id from flowfabric.budget b where b.name = p_name and b.id <> p_id;
        if found then
            code := 'exists';
            return next;
            return;
        end if;
    end if;
    v_before := flowfabric.lock_budgets(array[p_id], false);
    v_now := flowfabric.now();
    id := p_id;
    if exists (select from flowfabric.budget b where b.id = p_id and b.created_at is not null) then
        code := 'exists';
        return next;
        return;
    end if;
    h := flowfabric.widen_head(v_before[1], p_dimensions);
    select array_agg(coalesce(p_hard[array_position(p_dimensions, u.dim)], 0) order by u.ord),
           array_agg(coalesce(p_soft[array_position(p_dimensions, u.dim)], 0) order by u.ord)
    into h.hard, h.soft from unnest(h.dimensions) with ordinality as u (dim, ord);
    h.hard := coalesce(h.hard, '{}'); h.soft := coalesce(h.soft, '{}');
    h.dimensions := coalesce(h.dimensions, '{}'); h.used := coalesce(h.used, '{}'); h.held := coalesce(h.held, '{}');
    h.overrun := coalesce(h.overrun, '{}');
    h.is_strict := p_mode = 'strict';
    update flowfabric.budget b
    set name = p_name, scope_type = p_scope_type, scope_id = p_scope_id, mode = p_mode, on_hard_limit = p_on_hard,
        on_soft_limit = p_on_soft, reset_interval = case when p_interval_ms > 0 then flowfabric.ms(p_interval_ms) end,
        next_reset_at = case when p_interval_ms > 0 then v_now + flowfabric.ms(p_interval_ms) end,
        dimensions = coalesce((select array_agg(u.dim order by u.dim collate "C") from unnest(p_dimensions) as u (dim)), '{}'),
        hard = coalesce((select array_agg(u.bound order by u.dim collate "C") from unnest(p_dimensions, p_hard) as u (dim, bound)), '{}'),
        soft = coalesce((select array_agg(u.bound order by u.dim collate "C") from unnest(p_dimensions, p_soft) as u (dim, bound)), '{}'),
        created_at = v_now, updated_at = v_now, owner_partition = p_owner_partition, owner_id = p_owner,
        is_lowered = flowfabric.is_beyond(h)
    where b.id = p_id;
    perform flowfabric.write_heads(v_before, array[h], array[1], v_now);
    if p_interval_ms > 0 then
        perform flowfabric.wake_duties(v_now + flowfabric.ms(p_interval_ms));
    end if;
    code := 'created';
    return next;
end;
$$;

-- is_beyond: whether more is used and held than a hard limit allows.
create or replace function flowfabric.is_beyond(h flowfabric.budget_head) returns boolean
language sql immutable as $$
    select h.is_strict and exists (select from unnest(h.hard, h.used, h.held) as u (hard, used, held)
                                where u.hard > 0 and coalesce(u.used, 0)::numeric + u.held > u.hard)
$$;

-- check_budget: refuse what no budget may have; the engine checks in detail before it sends it.
create or replace function flowfabric.check_budget(
    p_name text, p_scope_type text, p_scope_id text, p_mode text, p_on_hard text, p_on_soft text, p_interval_ms bigint,
    p_dimensions text[], p_hard bigint[], p_soft bigint[])
returns void
language plpgsql immutable as $$
begin
    if p_mode not in ('strict', 'warn') or p_interval_ms not between 0 and 10000000000000
       or array['suspend', 'reroute_fallback', 'close_scope'] && array[p_on_hard, p_on_soft]
       or exists (select from unnest(array[p_name, p_scope_type, p_scope_id, p_on_hard, p_on_soft]) as u (word)
                  where octet_length(u.word) > 256 or u.word ~ '[[:cntrl:]]')
       or exists (select from unnest(p_dimensions) as u (dim)
                  where u.dim is null or octet_length(u.dim) not between 1 and 256 or u.dim ~ '[[:cntrl:]]')
       or exists (select from unnest(p_hard || p_soft) as u (bound) where u.bound is null or u.bound < 0)
       or cardinality(p_dimensions) > 64
       or cardinality(p_dimensions) <> (select count(distinct u.dim) from unnest(p_dimensions) as u (dim)) then
        raise exception 'not the definition of a budget' using errcode = 'invalid_parameter_value';
    end if;
end;
$$;
