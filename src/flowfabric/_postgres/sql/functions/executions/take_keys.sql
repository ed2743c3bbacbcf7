-- take_keys: take the idempotency keys of new executions, or find those that are taken
--
-- Called by create_executions. Of equal keys inside the call the first with a window wins and later ones are its
-- duplicates; a key without a window never matches, so that all before the winner are created too. An item that would
-- not be created anyway (p_unfit) takes no key from later ones.
-- Locks    the keys, in order.
-- Returns  per item 'duplicate' or null, and the id that has the key of a duplicate.
create or replace function flowfabric.take_keys(
    p_flow uuid[], p_namespace text[], p_key text[], p_id uuid[], p_dedup_ms bigint[],
    p_unfit text[], p_now timestamptz, out code text[], out standing uuid[])
language plpgsql as $$
#variable_conflict use_column
begin
    with item as (
        select u.*, min(u.ord) filter (where p_unfit[u.ord] is null and u.dedup > 0) over w is not null as windowed,
               coalesce(min(u.ord) filter (where p_unfit[u.ord] is null and u.dedup > 0) over w,
                        max(u.ord) filter (where p_unfit[u.ord] is null) over w) as first_ord
        from (select coalesce(k.flow, flowfabric.zero_uuid()) as scope,
                     coalesce(k.namespace, '') as namespace, k.key, k.id, coalesce(k.dedup, 86400000) as dedup, k.ord::integer as ord
              from unnest(p_flow, p_namespace, p_key, p_id, p_dedup_ms)
                   with ordinality as k (flow, namespace, key, id, dedup, ord)) u
        window w as (partition by u.scope, u.namespace, u.key order by u.ord
                     rows between unbounded preceding and unbounded following)
    ), won as (
        insert into flowfabric.idempotency as i (scope, namespace, key, id, expires_at)
        -- Without a window it has expired for every call, even for one that began earlier and waited.
        select t.scope, t.namespace, t.key, t.id,
               case when t.dedup > 0 then p_now + flowfabric.ms(t.dedup) else '-infinity' end
        from item t where t.ord = t.first_ord and t.key is not null
        order by t.scope, t.namespace, t.key
        on conflict (scope, namespace, key) do update
            set id = excluded.id, expires_at = excluded.expires_at
            where i.expires_at <= p_now
        returning i.scope, i.namespace, i.key
    )
    select array_agg(case when t.key is null then null
                          when t.first_ord is null then case when i.is_taken then 'duplicate' end
                          when not t.is_won then 'duplicate'
                          when t.ord > t.first_ord and t.windowed then 'duplicate' end order by t.ord)
    into code
    -- Sorted together: a join of two lists of the call could be nested.
    from (select a.*, bool_or(a.ord is null) over (partition by a.scope, a.namespace, a.key) as is_won
          from (select t.scope, t.namespace, t.key, t.ord, t.first_ord, t.windowed from item t
                union all select w.scope, w.namespace, w.key, null, null, null from won w) a) t
    left join lateral (select true as is_taken from flowfabric.idempotency x
                       where t.first_ord is null and x.scope = t.scope and x.namespace = t.namespace and x.key = t.key
                         and x.expires_at > p_now offset 0) i on true
    where t.ord is not null;
    -- A new statement sees what the winner of the race committed meanwhile.
    if array_position(take_keys.code, 'duplicate') is not null then
        select array_agg(case when take_keys.code[u.ord] is not null then i.id end order by u.ord) into standing
        from unnest(p_flow, p_namespace, p_key) with ordinality as u (flow, namespace, key, ord)
        left join flowfabric.idempotency i on i.scope = coalesce(u.flow, flowfabric.zero_uuid())
             and i.namespace = coalesce(u.namespace, '') and i.key = u.key;
    end if;
end;
$$;

-- give_back_keys: release the keys of items that were not created after all.
create or replace function flowfabric.give_back_keys(
    p_flow uuid[], p_namespace text[], p_key text[], p_id uuid[], p_code text[], p_now timestamptz)
returns void
language sql volatile as $$
    delete from flowfabric.idempotency i
    using unnest(p_flow, p_namespace, p_key, p_id) with ordinality as u (flow, namespace, key, id, ord)
    where p_code[u.ord] in ('exists', 'lane_closed')
      and i.scope = coalesce(u.flow, flowfabric.zero_uuid()) and i.namespace = coalesce(u.namespace, '')
      and i.key = u.key and i.id = u.id and i.expires_at > p_now
$$;
