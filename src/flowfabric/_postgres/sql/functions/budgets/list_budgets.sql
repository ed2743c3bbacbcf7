-- list_budgets: budgets in the order of their names, each filter optional
--
-- Takes    p_prefix: how their names begin; p_after: names after this one.
-- Roles    read, submit, work, operate
create or replace function flowfabric.list_budgets(
    p_scope_type text, p_scope_id text, p_exhausted boolean, p_prefix text, p_owner uuid, p_after text, p_limit integer)
returns setof flowfabric.budget_view
language plpgsql stable security definer as $$
begin
    if p_owner is not null then
        return query
        select v.* from flowfabric.budget_view v
        where v.owner_id = p_owner and v.created_at is not null
          and (p_scope_type is null or v.scope_type = p_scope_type) and (p_scope_id is null or v.scope_id = p_scope_id)
          and (p_exhausted is null or (v.exhausted is not null) = p_exhausted)
          and (p_prefix is null or starts_with(v.name, p_prefix)) and v.name > coalesce(p_after, '')
        order by v.name limit p_limit;
    elsif p_scope_type is not null and p_scope_id is not null then
        return query
        select v.* from flowfabric.budget_view v
        where v.scope_type = p_scope_type and v.scope_id = p_scope_id and v.created_at is not null
          and (p_exhausted is null or (v.exhausted is not null) = p_exhausted)
          and v.name >= coalesce(p_prefix, '') and (p_prefix is null or starts_with(v.name, p_prefix))
          and v.name > coalesce(p_after, '')
        order by v.scope_type, v.scope_id, v.name limit p_limit;
    else
        return query
        select v.* from flowfabric.budget_view v
        where v.created_at is not null
          and (p_scope_type is null or v.scope_type = p_scope_type) and (p_scope_id is null or v.scope_id = p_scope_id)
          and (p_exhausted is null or (v.exhausted is not null) = p_exhausted)
          and v.name >= coalesce(p_prefix, '') and v.name <= coalesce(p_prefix, '') || chr(1114111)
          and (p_prefix is null or starts_with(v.name, p_prefix)) and v.name > coalesce(p_after, '')
        order by v.name limit p_limit;
    end if;
end;
$$;
