-- audit_limit_binding: A binding has an id that follows from its content, a scope, and a limit that exists.
create or replace function flowfabric.audit_limit_binding(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with alone as materialized (   -- as is_bound, for all routes at once
        select b.lane, b.kind from flowfabric.limit_binding b where num_nonnulls(b.namespace, b.tag, b.flow_kind) = 0
    )
    select 'limit_binding', null::integer, b.id, concat_ws(' ', b.what, b.limit_id)
    from flowfabric.limit_binding b
    where b.id <> flowfabric.binding_id(b.limit_id, b.lane, b.kind, b.namespace, b.tag, b.value, b.flow_kind)
       or b.anchor is distinct from left(coalesce('tag ' || b.tag || ' ' || b.value, 'namespace ' || b.namespace,
                                                  'flow ' || b.flow_kind, 'kind ' || b.kind, 'lane ' || b.lane), 200)
       or b.what = 'budget' and not exists (select from flowfabric.budget x where x.id = b.limit_id)
       or b.what = 'quota' and not exists (select from flowfabric.quota_policy x where x.id = b.limit_id)
    union all   -- a route says that it has none
    select 'limit_binding', null::integer, null::uuid, r.lane || ' ' || r.kind from flowfabric.route r
    where r.is_free
      and exists (select from alone a where (a.lane is null or a.lane = r.lane) and (a.kind is null or a.kind = r.kind))
$$;
