-- known_keys: the keys of items that their budgets know: the position of the budget, a space, the key
--
-- Called by apply_usage, under the locks of the budgets. A key that has expired is unknown, swept or not.
create or replace function flowfabric.known_keys(
    p_key text[], p_item integer[], p_number integer[], p_ids uuid[], p_now timestamptz) returns text[]
language plpgsql volatile as $$
begin
    return array(
        select u.no || ' ' || s.key
        from unnest(p_item, p_number) as u (item, no)
        cross join lateral (select x.key, x.expires_at from flowfabric.budget_key x
                            where x.budget_id = p_ids[u.no] and x.key = p_key[u.item] limit 1) s
        where s.expires_at > p_now);
end;
$$;

-- recorded_usage: the items that are recorded as steps, each with what was left then.
create or replace function flowfabric.recorded_usage(
    p_partition integer[], p_id uuid[], p_name text[], p_n integer[], out items integer[], out results bytea[])
language plpgsql volatile as $$
begin
    select coalesce(array_agg(g.ord::integer), '{}'), coalesce(array_agg(s.result), '{}') into items, results
    from unnest(p_partition, p_id, p_name, p_n) with ordinality as g (partition, id, name, n, ord)
    join flowfabric.execution e on e.partition = g.partition and e.id = g.id
    cross join lateral (select x.result from flowfabric.step x   -- one by one, whatever the statistics say
                        where x.partition = e.partition and x.id = e.id and x.generation = e.generation
                          and x.kind = 'usage' and x.name = g.name and x.n = g.n offset 0) s;
end;
$$;
