-- collect_ended: give back or charge what reservations hold whose lease has ended
--
-- Called by the duty: for ends that found a budget locked, and as a backstop for all.
-- Takes    p_marked: only those that an end left, up to 1,000; p_low_water: none of them is left from before it. Those of damaged
--          budgets are left to the backstop, which reports them.
-- Locks    the budgets, by id, skipping those that are locked.
-- A round that fails as a whole is repeated one by one; a budget that fails alone is reported and tried again by the next.
-- Returns  how many rows of reservations were handled, how many budgets failed with the last message, and whether more may be
--          left.
-- Roles    work, operate
create or replace function flowfabric.collect_ended(p_marked boolean, p_limit integer, p_low_water timestamptz)
returns table (handled integer, failed integer, message text, more boolean)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz := flowfabric.now();
    v_ids uuid[];
    v_budgets uuid[]; v_partitions integer[]; v_marked uuid[];   -- the executions, if only marked ones are wanted
begin
    perform flowfabric.require_read_committed();
    handled := 0; failed := 0;
    if p_marked then
        select coalesce(array_agg(s.budget_id), '{}'), array_agg(s.partition), array_agg(s.id)
        into v_budgets, v_partitions, v_marked
        from (select r.* from flowfabric.reservation r
              where r.lost is not null and r.state = 'held' and r.lost_at > coalesce(p_low_water, '-infinity')
              order by r.lost_at limit 1000) s
        where flowfabric.ended_lease(s::flowfabric.reservation, v_now) is not null;
        v_ids := array(select u.id from (select distinct x.id from unnest(v_budgets) as x (id)) u
                       where not flowfabric.is_damaged(u.id) order by 1 limit p_limit);
    else
        v_ids := array(select distinct s.budget_id from flowfabric.reservation s
                       where s.state = 'held' and flowfabric.ended_lease(s, v_now) is not null order by 1 limit p_limit);
    end if;
    begin
        for i in 1 .. cardinality(v_ids) loop
            handled := handled + flowfabric.collect_of(v_ids[i], v_budgets, v_partitions, v_marked, v_now);
        end loop;
    exception
    when serialization_failure or deadlock_detected then
        raise;
    when others then
        handled := 0;
        for i in 1 .. cardinality(v_ids) loop
            begin
                handled := handled + flowfabric.collect_of(v_ids[i], v_budgets, v_partitions, v_marked, v_now);
            exception when others then
                failed := failed + 1;
                message := 'budget ' || v_ids[i] || ': ' || sqlerrm;
            end;
        end loop;
    end;
    more := (cardinality(v_ids) >= p_limit or cardinality(v_budgets) >= 1000) and handled > 0;
    return next;
end;
$$;

-- collect_of: the same for one budget, unless it is locked: for these executions, or (null) for all.
create or replace function flowfabric.collect_of(
    p_budget uuid, p_budgets uuid[], p_partitions integer[], p_ids uuid[], p_now timestamptz)
returns integer
language plpgsql as $$
declare
    v_partitions integer[]; v_ids uuid[];
begin
    perform from flowfabric.budget b where b.id = p_budget for no key update skip locked;
    if not found then
        return 0;
    end if;
    if p_budgets is null then
        return flowfabric.collect_reservations(array[p_budget], '{}', '{}', true, null, p_now);
    end if;
    select array_agg(u.partition), array_agg(u.id) into v_partitions, v_ids
    from unnest(p_budgets, p_partitions, p_ids) as u (budget, partition, id) where u.budget = p_budget;
    return flowfabric.collect_reservations(array[p_budget], v_partitions, v_ids, false, null, p_now);
end;
$$;

-- first_ended: when the first reservation of a sound budget was marked, after p_after; among the first 1,000.
create or replace function flowfabric.first_ended(p_after timestamptz) returns timestamptz
language sql stable as $$
    select min(b.at)
    from (select m.budget_id, min(m.lost_at) as at
          from (select r.budget_id, r.lost_at from flowfabric.reservation r
                where r.lost is not null and r.state = 'held' and r.lost_at > p_after order by r.lost_at limit 1000) m
          group by m.budget_id) b
    where not flowfabric.is_damaged(b.budget_id)
$$;
