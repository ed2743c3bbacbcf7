-- bind_items: the budgets and policies of the items of a create call, with those that bindings give them
--
-- Called by everything that creates executions, before their limit sets are stored. A binding is found by one of the texts it
-- asks for, its anchor: the most particular one. Each item is looked up by every text that could be an anchor.
-- Takes    p_lanes, p_kinds and p_route_no: as create_executions; p_flow_kind: the kind of the flow they are members of.
-- Returns  p_budgets and p_quotas, per item and separated by commas; null if no item has any.
create or replace function flowfabric.bind_items(
    p_count integer, p_lanes text[], p_kinds text[], p_route_no integer[], p_namespace text[], p_tags text[], p_flow_kind text,
    inout p_budgets text[], inout p_quotas text[])
language plpgsql stable as $$
declare
    v_budgets text[]; v_quotas text[];
begin
    if not exists (select from flowfabric.limit_binding) then
        return;
    end if;
    select array_agg(nullif(concat_ws(',', nullif(o.budgets, ''), g.budgets), '') order by o.ord),
           array_agg(nullif(concat_ws(',', nullif(o.quotas, ''), g.quotas), '') order by o.ord)
    into v_budgets, v_quotas
    from (select s.ords, s.budgets as given_budgets, s.quotas as given_quotas, b.*
          from (select array_agg(u.ord) as ords, array_agg(u.budgets) as budgets, array_agg(u.quotas) as quotas,
                       p_lanes[coalesce(u.no, 1)] as lane, p_kinds[coalesce(u.no, 1)] as kind, u.namespace,
                       case when jsonb_typeof(u.tags::jsonb) = 'object' then u.tags::jsonb end as tags
                from unnest(array_fill(0, array[p_count]), p_route_no, p_namespace, p_tags, p_budgets, p_quotas) with ordinality
                     as u (one, no, namespace, tags, budgets, quotas, ord)
                group by coalesce(u.no, 1), u.namespace, u.tags) s
          cross join lateral (
              select string_agg(b.limit_id::text, ',') filter (where b.what = 'budget') as budgets,
                     string_agg(b.limit_id::text, ',') filter (where b.what = 'quota') as quotas
              from (select 'lane ' || s.lane union all select 'kind ' || s.kind
                    union all select 'namespace ' || s.namespace where s.namespace <> ''
                    union all select 'flow ' || p_flow_kind where p_flow_kind <> ''
                    union all select 'tag ' || t.tag || ' ' || t.value
                    from jsonb_each_text(s.tags) as t (tag, value)) as a (anchor)
              cross join lateral (select x.* from flowfabric.limit_binding x
                                  where x.anchor = left(a.anchor, 200) collate "C" offset 0) b
              where (b.lane is null or b.lane = s.lane) and (b.kind is null or b.kind = s.kind)
                and (b.namespace is null or b.namespace = s.namespace)
                and (b.flow_kind is null or b.flow_kind = p_flow_kind)
                and (b.tag is null or s.tags ->> b.tag = b.value)) b) g
    cross join lateral unnest(g.ords, g.given_budgets, g.given_quotas) as o (ord, budgets, quotas);
    p_budgets := case when num_nonnulls(variadic v_budgets) > 0 then v_budgets end;
    p_quotas := case when num_nonnulls(variadic v_quotas) > 0 then v_quotas end;
end;
$$;
