-- end_reservations: leases end: their reservations are given back, or charged if the leases are lost
--
-- Called by every call that ends a lease, under the locks of the executions, if one of them ever held something. It
-- never waits for a budget, and a damaged one keeps no execution from its end: the duty does what is left (collect_ended).
-- Locks    the budgets that no other transaction has locked, by id.
create or replace function flowfabric.end_reservations(
    p_partition integer[], p_id uuid[], p_lost boolean, p_now timestamptz)
returns void
language plpgsql as $$
declare
    v_budgets uuid[];
    v_free uuid[];
begin
    select array_agg(distinct s.budget_id order by s.budget_id) into v_budgets
    from unnest(p_partition, p_id) as u (partition, id)
    -- The fence (offset 0) keeps the plan on the key: the index of held ones has every reservation of a budget.
    cross join lateral (select x.budget_id, x.state from flowfabric.reservation x
                        where x.partition = u.partition and x.id = u.id offset 0) s
    where s.state = 'held';
    if v_budgets is null then
        return;
    end if;
    with free as materialized (
        select b.id from flowfabric.budget b where b.id = any (v_budgets) order by b.id for no key update skip locked
    )
    select array_agg(f.id order by f.id) into v_free from free f where not flowfabric.is_damaged(f.id);
    if v_free is not null then
        perform flowfabric.collect_reservations(v_free, p_partition, p_id, false, p_lost, p_now);
    end if;
    if cardinality(v_free) is distinct from cardinality(v_budgets) then
        with mine as materialized (
            select r.ctid as tid from flowfabric.reservation r
            where r.ctid = any (array(
                select s.tid from unnest(p_partition, p_id) as u (partition, id)
                cross join lateral (select x.ctid as tid, x.state from flowfabric.reservation x
                                    where x.partition = u.partition and x.id = u.id offset 0) s
                where s.state = 'held'))
            for no key update skip locked
        )
        update flowfabric.reservation s set lost = coalesce(s.lost, p_lost), lost_at = coalesce(s.lost_at, p_now)
        where s.ctid = any (array(select m.tid from mine m));
        perform flowfabric.wake_duties(p_now);
    end if;
end;
$$;
