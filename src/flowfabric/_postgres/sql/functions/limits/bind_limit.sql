-- bind_limit: executions of a scope that are submitted from now on get a limit
--
-- Existing executions keep their limits: submissions look bindings up once (bind_items). The same binding again changes nothing.
-- Takes    the budget or quota policy, and what a submission must have to get it: all that is not null.
--          p_declared: the code of an app declares it, and may remove it again.
-- Locks    for a lane or kind alone: the row `deployment`. It waits for open transactions that created a route; no call
--          waits for it.
-- Returns  bound, exists, not_found, or owned: the budget belongs to one execution or flow.
-- Roles    work, operate
create or replace function flowfabric.bind_limit(
    p_limit uuid, p_lane text, p_kind text, p_namespace text, p_tag text, p_value text, p_flow_kind text, p_declared boolean)
returns text
language plpgsql security definer as $$
declare
    v_what text;
    v_owner uuid;
begin
    perform flowfabric.require_read_committed();
    if num_nonnulls(p_lane, p_kind, p_namespace, p_tag, p_flow_kind) = 0 or (p_tag is null) <> (p_value is null)
       or '' in (p_lane, p_kind, p_namespace, p_tag, p_flow_kind)
       or greatest(octet_length(p_lane), octet_length(p_kind), octet_length(p_namespace), octet_length(p_tag),
                   octet_length(p_value), octet_length(p_flow_kind)) > 4096 then
        raise exception 'a binding has a scope: texts that are not empty' using errcode = 'invalid_parameter_value';
    end if;
    select q.what, q.owner into v_what, v_owner
    from (select 'budget' as what, b.owner_id as owner from flowfabric.budget b where b.id = p_limit and b.created_at is not null
          union all
          select 'quota', null from flowfabric.quota_policy p where p.id = p_limit) q limit 1;
    if not found then
        return 'not_found';
    elsif v_owner is not null then
        return 'owned';
    end if;
    if num_nonnulls(p_namespace, p_tag, p_flow_kind) = 0 then
        perform from flowfabric.deployment d for update;   -- no route is created meanwhile that does not see it
        update flowfabric.route r set is_free = false
        where r.is_free and (p_lane is null or r.lane = p_lane) and (p_kind is null or r.kind = p_kind);
    end if;
    insert into flowfabric.limit_binding
        (id, anchor, what, limit_id, lane, kind, namespace, tag, value, flow_kind, is_declared, created_at)
    values (flowfabric.binding_id(p_limit, p_lane, p_kind, p_namespace, p_tag, p_value, p_flow_kind),
            left(case when p_tag is not null then 'tag ' || p_tag || ' ' || p_value
                      when p_namespace is not null then 'namespace ' || p_namespace
                      when p_flow_kind is not null then 'flow ' || p_flow_kind
                      when p_kind is not null then 'kind ' || p_kind
                      else 'lane ' || p_lane end, 200),
            v_what, p_limit, p_lane, p_kind, p_namespace, p_tag, p_value, p_flow_kind, p_declared, flowfabric.now())
    on conflict do nothing;
    return case when found then 'bound' else 'exists' end;
end;
$$;

-- binding_id: the id of a binding, which follows from its content.
create or replace function flowfabric.binding_id(
    p_limit uuid, p_lane text, p_kind text, p_namespace text, p_tag text, p_value text, p_flow_kind text)
returns uuid
language sql stable as $$
    select md5(jsonb_build_array(p_limit, p_lane, p_kind, p_namespace, p_tag, p_value, p_flow_kind)::text)::uuid
$$;
