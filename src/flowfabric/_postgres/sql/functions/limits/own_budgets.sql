-- own_budgets: the budgets of new executions, with the id of the execution in the place of the zero id, which means its own.
create or replace function flowfabric.own_budgets(p_budgets text[], p_id uuid[]) returns text[]
language sql immutable as $$
    select array_agg(replace(u.budgets, flowfabric.zero_uuid()::text, u.id::text) order by u.ord)
    from unnest(p_budgets, p_id) with ordinality as u (budgets, id, ord)
$$;

-- inherited_budgets: the budgets of what a handler submits, with those of the limit set of its own execution, unless a policy
-- refuses them.
create or replace function flowfabric.inherited_budgets(
    p_budgets text[], p_policy text[], p_count integer, p_limits bigint)
returns text[]
language plpgsql stable as $$
declare
    v_of text;
begin
    select array_to_string(l.budget_ids, ',') into v_of from flowfabric.limit_set l where l.digest = p_limits limit 1;
    if coalesce(v_of, '') = '' then
        return p_budgets;
    end if;
    return (select array_agg(nullif(concat_ws(',', p_budgets[n], case when not coalesce(
                       (case when cardinality(p_policy) = 1 then p_policy[1] else p_policy[n] end::jsonb ->> 'inherit_budgets')
                       = 'false', false) then v_of end), '') order by n)
            from generate_series(1, p_count) as n);
end;
$$;
