-- list_bindings: bindings by limit
--
-- Takes    p_limit: only those of this one; p_after_limit, p_after: those after this binding.
-- Roles    read, work, operate
create or replace function flowfabric.list_bindings(p_limit uuid, p_after_limit uuid, p_after uuid, p_count integer)
returns table (
    id uuid, what text, limit_id uuid, name text, lane text, kind text, namespace text, tag text, value text, flow_kind text,
    is_declared boolean, created_at timestamptz)
language sql stable security definer as $$
    select b.id, b.what, b.limit_id,
           case b.what when 'budget' then (select x.name from flowfabric.budget x where x.id = b.limit_id)
                       else (select x.name from flowfabric.quota_policy x where x.id = b.limit_id) end,
           b.lane, b.kind, b.namespace, b.tag, b.value, b.flow_kind, b.is_declared, b.created_at
    from flowfabric.limit_binding b
    where (p_limit is null or b.limit_id = p_limit)
      and (p_after is null or (b.limit_id, b.id) > (p_after_limit, p_after))
    order by b.limit_id, b.id limit p_count
$$;
