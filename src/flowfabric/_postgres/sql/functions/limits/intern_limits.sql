-- intern_limits: the number of the limit set with these budgets and quota policies; null when there is none
--
-- Called by submissions, also inside a caller's transaction: it waits for nothing. A set is found by the number that follows
-- from its content, and may be stored twice; a set that the sweep found unused is stored again before that removes it.
-- Takes    p_tags: of the execution: a policy that is kept by a tag holds for each of its values.
create or replace function flowfabric.intern_limits(p_budgets uuid[], p_quotas uuid[], p_tags jsonb) returns bigint
language plpgsql as $$
declare
    v_budgets uuid[]; v_quotas uuid[]; v_keys text[];
    v_digest bigint;
begin
    if coalesce(cardinality(p_budgets), 0) + coalesce(cardinality(p_quotas), 0) = 0 then
        return null;
    end if;
    select coalesce(array_agg(b.id), '{}') into v_budgets
    from (select distinct u.id from unnest(p_budgets) as u (id) where u.id is not null order by u.id) b;
    select coalesce(array_agg(q.id), '{}'), coalesce(array_agg(flowfabric.quota_key(p_tags ->> p.key)), '{}')
    into v_quotas, v_keys
    from (select distinct u.id from unnest(p_quotas) as u (id) where u.id is not null order by u.id) q
    left join flowfabric.quota_policy p on p.id = q.id;
    v_digest := ('x' || left(encode(sha256(convert_to(
        v_budgets::text || v_quotas::text || v_keys::text, 'UTF8')), 'hex'), 16))::bit(64)::bigint;
    insert into flowfabric.limit_set (digest, budget_ids, quota_ids, quota_keys, checked_at)
    select v_digest, v_budgets, v_quotas, v_keys, flowfabric.now()
    where not exists (select from flowfabric.limit_set l where l.digest = v_digest and l.unused_since is null);
    return v_digest;
end;
$$;

-- quota_key: the value of a tag as the key of a policy; a long one, which no index takes, by its digest.
create or replace function flowfabric.quota_key(p_value text) returns text
language sql immutable as $$
    select case when octet_length(p_value) > 256 then 'sha256:' || encode(sha256(convert_to(p_value, 'UTF8')), 'hex')
                else coalesce(nullif(p_value, ''), 'default') end
$$;

-- intern_items: the limit sets of the items of a create call, in order; null if no item has one.
--
-- Takes    budgets and policies per item, separated by commas; p_code: items with one are not created.
create or replace function flowfabric.intern_items(
    p_budgets text[], p_quotas text[], p_tags text[], p_code text[]) returns bigint[]
language plpgsql as $$
declare
    v_limits bigint[];
    -- Tags matter only to policies that are kept by one.
    v_keyed boolean := exists (
        select from (select distinct i.ids from unnest(p_quotas) as i (ids)) d
        cross join lateral unnest(string_to_array(d.ids, ',')::uuid[]) as q (id)
        join flowfabric.quota_policy p on p.id = q.id where p.key is not null);
begin
    select array_agg(g.limits order by o.ord) into v_limits
    from (select array_agg(i.ord) as ords, case when num_nonnulls(i.budgets, i.quotas) > 0 then flowfabric.intern_limits(
                     string_to_array(i.budgets, ',')::uuid[], string_to_array(i.quotas, ',')::uuid[], i.tags::jsonb) end as limits
          from (select u.ord, case when p_code[u.ord] is null then u.budgets end as budgets,
                       case when p_code[u.ord] is null then u.quotas end as quotas,
                       case when v_keyed and u.quotas is not null then u.tags end as tags
                from unnest(p_budgets, p_quotas, p_tags) with ordinality as u (budgets, quotas, tags, ord)) i
          group by i.budgets, i.quotas, i.tags) g
    cross join lateral unnest(g.ords) as o (ord);
    return case when exists (select from unnest(v_limits) as l (limits) where l.limits is not null) then v_limits end;
end;
$$;

-- split_routes: the routes of a create call once for items without and once for items with limits.
--
-- Takes    p_route_no: per item its route, null: the first; p_limits: per item its limit set.
-- Returns  the routes that items use, and per item its route among them.
create or replace function flowfabric.split_routes(
    p_lanes text[], p_kinds text[], p_capabilities text[], p_route_no integer[], p_limits bigint[],
    out lanes text[], out kinds text[], out capabilities text[], out limited boolean[], out route_no integer[])
language plpgsql as $$
declare
    v_numbers integer[];   -- per item: twice its route, and one more if it has limits
    v_used integer[];
begin
    if p_limits is null then
        lanes := p_lanes; kinds := p_kinds; capabilities := p_capabilities; route_no := p_route_no;
        return;
    end if;
    v_numbers := array(select 2 * coalesce(p_route_no[u.ord], 1) + case when u.limits is null then 0 else 1 end
                       from unnest(p_limits) with ordinality as u (limits, ord) order by u.ord);
    select array_agg(n.no order by n.no), array_agg(p_lanes[n.no / 2] order by n.no), array_agg(p_kinds[n.no / 2] order by n.no),
           array_agg(p_capabilities[n.no / 2] order by n.no), array_agg(n.no % 2 = 1 order by n.no)
    into v_used, lanes, kinds, capabilities, limited
    from (select distinct u.no from unnest(v_numbers) as u (no)) n;
    route_no := array(select array_position(v_used, u.no) from unnest(v_numbers) with ordinality as u (no, ord) order by u.ord);
end;
$$;
