-- create_owned: the budgets that new executions own, as their policies define them; the id of the execution is that of its
-- budget
--
-- Called by insert_executions for executions with limits. No other transaction knows these budgets yet, so nothing waits.
create or replace function flowfabric.create_owned(
    p_partition integer[], p_id uuid[], p_code text[], p_policy text[], p_now timestamptz)
returns void
language plpgsql as $$
begin
    if exists (select from unnest(p_policy) as u (policy)
               cross join lateral (select u.policy::jsonb -> 'budget' as own) b
               where jsonb_typeof(b.own) <> 'null' and (
                   jsonb_typeof(b.own) <> 'object' or coalesce(b.own ->> 'enforcement_mode', 'strict') not in ('strict', 'warn')
                   or jsonb_typeof(b.own -> 'hard') not in ('object', 'null') or jsonb_typeof(b.own -> 'soft') not in ('object', 'null')
                   or exists (select from jsonb_each(coalesce(nullif(b.own -> 'hard', 'null'), '{}')) as d (dim, amount)
                              where d.dim = '' or octet_length(d.dim) > 256 or d.dim ~ '[[:cntrl:]]'
                                 or d.amount::text !~ '^[0-9]{1,19}$' or d.amount::numeric > 9223372036854775807)
                   or exists (select from jsonb_each(coalesce(nullif(b.own -> 'soft', 'null'), '{}')) as d (dim, amount)
                              where d.dim = '' or octet_length(d.dim) > 256 or d.dim ~ '[[:cntrl:]]'
                                 or d.amount::text !~ '^[0-9]{1,19}$' or d.amount::numeric > 9223372036854775807))) then
        raise exception 'not the definition of a budget' using errcode = 'invalid_parameter_value';
    end if;
    with own as materialized (
        select u.partition, u.id, coalesce(b.own ->> 'enforcement_mode', 'strict') as mode, l.dims, l.hard, l.soft
        from unnest(p_partition, p_id) with ordinality as u (partition, id, ord)
        cross join lateral (select case when cardinality(p_policy) = 1 then p_policy[1] else p_policy[u.ord] end::jsonb
                                   -> 'budget' as own) b
        cross join lateral (
            select coalesce(array_agg(d.dim order by d.dim collate "C"), '{}') as dims,
                   coalesce(array_agg(d.hard order by d.dim collate "C"), '{}') as hard,
                   coalesce(array_agg(d.soft order by d.dim collate "C"), '{}') as soft
            from (select coalesce(h.dim, s.dim) as dim, coalesce(h.amount, '0')::bigint as hard,
                         coalesce(s.amount, '0')::bigint as soft
                  from jsonb_each_text(coalesce(nullif(b.own -> 'hard', 'null'), '{}')) as h (dim, amount)
                  full join jsonb_each_text(coalesce(nullif(b.own -> 'soft', 'null'), '{}')) as s (dim, amount)
                       on s.dim = h.dim) d) l
        where jsonb_typeof(b.own) = 'object' and (p_code is null or p_code[u.ord] is null)
    ), made as (
        insert into flowfabric.budget
            (id, name, mode, dimensions, hard, soft, created_at, updated_at, owner_partition, owner_id)
        select o.id, o.id::text, o.mode, o.dims, o.hard, o.soft, p_now, p_now, o.partition, o.id from own o
        on conflict do nothing
        returning id
    )
    insert into flowfabric.budget_head
        (budget_id, seq, at, breaches, soft_breaches, generation, is_strict, dimensions, used, held, overrun, hard, soft)
    select o.id, 1, p_now, 0, 0, 0, o.mode = 'strict', o.dims, array_fill(null::bigint, array[cardinality(o.dims)]),
           array_fill(0::bigint, array[cardinality(o.dims)]), array_fill(0::bigint, array[cardinality(o.dims)]), o.hard, o.soft
    from made m join own o on o.id = m.id;
end;
$$;
