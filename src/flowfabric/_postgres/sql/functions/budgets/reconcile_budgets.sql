-- reconcile_budgets: compare the running numbers of one page of budgets with their rules, and one page of the ledger
--
-- Called by the duty. Usage is never rewritten: wrong numbers are reported. It refreshes the mark of exhausted budgets, removes
-- budgets whose owner was purged, and what the ledger has of purged executions.
-- Takes    p_after, p_spent: the last budget and the last execution in the ledger of the page before; null: from the first on.
--          p_limit: how many of either.
-- Locks    a budget whose mark is wrong.
-- Returns  how many rows were corrected or removed, how many budgets are wrong, the last problem, and where the next page
--          begins; null: at the first.
-- Roles    work, operate
create or replace function flowfabric.reconcile_budgets(p_after uuid, p_spent uuid, p_limit integer)
returns table (corrected integer, wrong integer, message text, last_id uuid, last_spent uuid)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_ids uuid[];
    v_spent uuid[];
    v_id uuid;
    v_owners uuid[];
    v_heads flowfabric.budget_head[];
    v_n integer;
begin
    perform flowfabric.require_read_committed();
    corrected := 0; wrong := 0;
    select array_agg(q.id order by q.id) into v_ids
    from (select b.id from flowfabric.budget b where b.id > coalesce(p_after, flowfabric.zero_uuid()) order by b.id limit p_limit) q;
    last_id := case when cardinality(v_ids) >= p_limit then v_ids[cardinality(v_ids)] end;
    v_ids := coalesce(v_ids, '{}');
    select count(distinct u.id), max(format('budget %s: %s', u.id, case
               when flowfabric.are_sound(h.dimensions, h.used, h.held, h.overrun, h.hard, h.soft)
               then format('%s %s/%s', d.dim, d.used, d.hard) else 'no running numbers, or damaged ones' end)) into wrong, message
    from unnest(v_ids) as u (id) join flowfabric.budget b on b.id = u.id
    left join lateral (select x.* from flowfabric.budget_head x where x.budget_id = u.id order by x.seq desc limit 1) h on true
    left join lateral unnest(h.dimensions, h.used, h.held, h.hard) as d (dim, used, held, hard) on true
    where flowfabric.are_sound(h.dimensions, h.used, h.held, h.overrun, h.hard, h.soft) is not true
              and flowfabric.is_damaged(u.id)
       or h.is_strict and d.hard > 0 and d.used > d.hard;
    for v_id in
        select u.id from unnest(v_ids) as u (id)
        cross join lateral (select x as head, x.exhausted from flowfabric.budget_head x where x.budget_id = u.id
                            order by x.seq desc limit 1) h
        where h.exhausted is distinct from flowfabric.exhausted_dimension(h.head) and not flowfabric.is_damaged(u.id)
        order by 1
    loop
        begin
            v_heads := flowfabric.lock_budgets(array[v_id], false);
            if (v_heads[1]).exhausted is distinct from flowfabric.exhausted_dimension(v_heads[1]) then
                perform flowfabric.write_heads(v_heads, v_heads, array[1], flowfabric.now());
                perform flowfabric.open_budgets(array[v_id], flowfabric.now());
                corrected := corrected + 1;
            end if;
        exception
        when serialization_failure or deadlock_detected then
            raise;
        when others then
            wrong := wrong + 1;
            message := 'budget ' || v_id || ': ' || sqlerrm;
        end;
    end loop;
    with recursive page as (
        (select s.execution_id, 1 as n from flowfabric.budget_spend s
         where s.execution_id > coalesce(p_spent, flowfabric.zero_uuid()) order by s.execution_id limit 1)
        union all
        select x.execution_id, p.n + 1 from page p cross join lateral (
            select s.execution_id from flowfabric.budget_spend s
            where s.execution_id > p.execution_id order by s.execution_id limit 1) x
        where p.n < p_limit
    )
    select array_agg(p.execution_id order by p.execution_id) into v_spent from page p;
    last_spent := case when cardinality(v_spent) >= p_limit then v_spent[p_limit] end;
    delete from flowfabric.budget_spend s where s.ctid = any (array(
        select x.tid from unnest(v_spent) as u (id) cross join flowfabric.deployment d
        cross join lateral (select y.ctid as tid from flowfabric.budget_spend y
                            where y.execution_id = u.id and y.is_known limit 1000) x
        where not exists (
            select from flowfabric.execution e
            where e.partition = flowfabric.partition_of(u.id, d.flow_partitions) and e.id = u.id offset 0)));
    get diagnostics v_n = row_count;
    corrected := corrected + v_n;
    select array_agg(b.owner_id) into v_owners
    from unnest(v_ids) as u (id) join flowfabric.budget b on b.id = u.id
    where b.owner_id is not null and b.created_at < flowfabric.now() - interval '1 day'   -- it may come before its owner
      and not exists (select from flowfabric.execution e where e.partition = b.owner_partition and e.id = b.owner_id)
      and not exists (select from flowfabric.flow f where f.partition = b.owner_partition and f.flow_id = b.owner_id);
    if v_owners is not null then
        corrected := corrected + flowfabric.drop_owned(v_owners);
    end if;
    return next;
end;
$$;

-- exhausted_dimension: the first dimension whose hard limit is reached; null: none.
create or replace function flowfabric.exhausted_dimension(h flowfabric.budget_head) returns text
language sql immutable as $$
    select u.dim from unnest(h.dimensions, h.used, h.hard) with ordinality as u (dim, used, hard, ord)
    where h.is_strict and u.hard > 0 and u.used >= u.hard order by u.ord limit 1
$$;
