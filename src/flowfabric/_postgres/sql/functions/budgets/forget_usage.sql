-- forget_usage: delete what budgets know about executions that are purged
--
-- Used amounts stay used. A reservation that is still held is given back first.
create or replace function flowfabric.forget_usage(p_partition integer[], p_id uuid[]) returns void
language plpgsql as $$
begin
    perform flowfabric.end_reservations(p_partition, p_id, false, flowfabric.now());
    delete from flowfabric.reservation r where r.ctid = any (array(
        select f.tid from unnest(p_partition, p_id) as u (partition, id)
        cross join lateral (select x.ctid as tid, x.state from flowfabric.reservation x
                            where x.partition = u.partition and x.id = u.id offset 0) f
        where f.state <> 'held'));
    delete from flowfabric.budget_usage b where b.ctid = any (array(
        select f.tid from unnest(p_partition, p_id) as u (partition, id)
        cross join lateral (select x.ctid as tid from flowfabric.budget_usage x
                            where x.partition = u.partition and x.id = u.id offset 0) f));
    delete from flowfabric.budget_spend s using unnest(p_id) as u (id) where s.execution_id = u.id;
end;
$$;

-- drop_owned: delete the budgets that executions or flows own, with everything that is stored about them
--
-- Called once the owners are deleted. A budget that a stored execution has stays: what the owner submitted, and what that
-- submitted, may spend or be replayed. The reconciler removes it after the last of them.
-- Returns  how many were deleted.
create or replace function flowfabric.drop_owned(p_owner uuid[]) returns integer
language plpgsql as $$
declare
    v_ids uuid[];
begin
    select array_agg(b.id order by b.id) into v_ids
    from unnest(p_owner) as u (id) join flowfabric.budget b on b.owner_id = u.id
    where not exists (
        -- Fences (offset 0) keep this on the index of the budget, and on that of the limit set.
        select from (select l.digest from flowfabric.limit_set l where l.budget_ids <> '{}' and l.budget_ids @> array[b.id] offset 0) s
        cross join lateral (select from flowfabric.execution e where e.limits = s.digest limit 1) e);
    if v_ids is null then
        return 0;
    end if;
    -- One that is locked now is left to the reconciler.
    with free as materialized (
        select b.id from flowfabric.budget b where b.id = any (v_ids) order by b.id for update skip locked
    )
    select array_agg(f.id order by f.id) into v_ids from free f;
    delete from flowfabric.budget_head h where h.budget_id = any (v_ids);
    delete from flowfabric.budget_key k where k.budget_id = any (v_ids);
    delete from flowfabric.budget_spend s where s.budget_id = any (v_ids);
    delete from flowfabric.reservation r using unnest(v_ids) as i (id) where r.budget_id = i.id and r.state = 'held';
    delete from flowfabric.budget b where b.id = any (v_ids);
    return coalesce(cardinality(v_ids), 0);
end;
$$;
