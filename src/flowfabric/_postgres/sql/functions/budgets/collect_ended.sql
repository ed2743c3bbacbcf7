-- collect_ended: give back or charge what reservations hold whose lease has ended
--
-- Called by the duty: for ends that found a budget locked, and as a backstop for all.
-- Takes    p_marked: only those that an end left.
-- Locks    the budgets, by id, skipping those that are locked.
-- Returns  how many rows of reservations were handled, and whether more may be left.
-- Roles    work, operate
create or replace function flowfabric.collect_ended(p_marked boolean, p_limit integer)
returns table (handled integer, more boolean)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz := flowfabric.now();
    v_id uuid;
    v_seen integer := 0;
begin
    perform flowfabric.require_read_committed();
    handled := 0;
    for v_id in select distinct s.budget_id from flowfabric.reservation s
                where s.state = 'held' and case when p_marked then s.lost is not null
                                                else flowfabric.ended_lease(s, v_now) is not null end
                order by 1 limit p_limit loop
        v_seen := v_seen + 1;
        perform from flowfabric.budget b where b.id = v_id for no key update skip locked;
        continue when not found;
        handled := handled + flowfabric.collect_reservations(array[v_id], '{}', '{}', true, null, v_now);
    end loop;
    more := v_seen >= p_limit and handled > 0;
    return next;
end;
$$;
