-- collect_ended: give back or charge what reservations hold whose lease has ended
--
-- Called by the duty: for ends that found a budget locked, and as a backstop for all.
-- Takes    p_marked: only those that an end left. Those of damaged budgets are left to the backstop, which reports them.
-- Locks    the budgets, by id, skipping those that are locked.
-- A round that fails as a whole is repeated one by one; a budget that fails alone is reported and tried again by the next.
-- Returns  how many rows of reservations were handled, how many budgets failed with the last message, and whether more may be
--          left.
-- Roles    work, operate
create or replace function flowfabric.collect_ended(p_marked boolean, p_limit integer)
returns table (handled integer, failed integer, message text, more boolean)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz := flowfabric.now();
    v_ids uuid[];
begin
    perform flowfabric.require_read_committed();
    handled := 0; failed := 0;
    v_ids := array(select u.budget_id
                   from (select distinct s.budget_id from flowfabric.reservation s
                         where s.state = 'held' and case when p_marked then s.lost is not null
                                                         else flowfabric.ended_lease(s, v_now) is not null end) u
                   where not (p_marked and flowfabric.is_damaged(u.budget_id))
                   order by 1 limit p_limit);
    begin
        for i in 1 .. cardinality(v_ids) loop
            handled := handled + flowfabric.collect_of(v_ids[i], v_now);
        end loop;
    exception
    when serialization_failure or deadlock_detected then
        raise;
    when others then
        handled := 0;
        for i in 1 .. cardinality(v_ids) loop
            begin
                handled := handled + flowfabric.collect_of(v_ids[i], v_now);
            exception when others then
                failed := failed + 1;
                message := 'budget ' || v_ids[i] || ': ' || sqlerrm;
            end;
        end loop;
    end;
    more := cardinality(v_ids) >= p_limit and handled > 0;
    return next;
end;
$$;

-- collect_of: the same for one budget, unless it is locked.
create or replace function flowfabric.collect_of(p_budget uuid, p_now timestamptz) returns integer
language plpgsql as $$
begin
    perform from flowfabric.budget b where b.id = p_budget for no key update skip locked;
    if not found then
        return 0;
    end if;
    return flowfabric.collect_reservations(array[p_budget], '{}', '{}', true, null, p_now);
end;
$$;

-- has_ended: whether an end left a reservation of a sound budget. It continues only past budgets that are damaged.
create or replace function flowfabric.has_ended() returns boolean
language sql stable as $$
    with recursive marked as (
        (select r.budget_id, flowfabric.is_damaged(r.budget_id) as damaged from flowfabric.reservation r
         where r.lost is not null and r.state = 'held' order by r.budget_id limit 1)
        union all
        select n.budget_id, flowfabric.is_damaged(n.budget_id)
        from marked m
        cross join lateral (
            select r.budget_id from flowfabric.reservation r
            where r.lost is not null and r.state = 'held' and r.budget_id > m.budget_id order by r.budget_id limit 1) n
        where m.damaged
    )
    select exists (select from marked m where not m.damaged)
$$;
