-- reset_due_budgets: reset the budgets whose period has ended, the earliest first
--
-- Called by the duty. Periods that were missed are one reset.
-- A round that fails as a whole is repeated one by one; a budget that fails alone is due again in 30 seconds, and reported.
-- Takes    p_low_water: none is left that was due before it.
-- Locks    the budgets, skipping those that are locked.
-- Returns  how many were reset, how many failed with the last message, and whether more are due.
-- Roles    work, operate
create or replace function flowfabric.reset_due_budgets(p_limit integer, p_low_water timestamptz)
returns table (handled integer, failed integer, message text, more boolean)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz := flowfabric.now();
    v_ids uuid[];
begin
    perform flowfabric.require_read_committed();
    select array_agg(q.id) into v_ids
    from (select b.id from flowfabric.budget b 
          where b.next_reset_at > coalesce(p_low_water, '-infinity') and b.next_reset_at <= v_now
          order by b.next_reset_at limit least(p_limit, 1000) for no key update skip locked) q;
    handled := 0; failed := 0; more := coalesce(cardinality(v_ids), 0) >= p_limit;
    begin
        for i in 1 .. coalesce(cardinality(v_ids), 0) loop
            handled := handled + (flowfabric.begin_period(v_ids[i], true) = 'ok')::integer;
        end loop;
    exception
    when serialization_failure or deadlock_detected then
        raise;
    when others then
        handled := 0;
        for i in 1 .. cardinality(v_ids) loop
            begin
                handled := handled + (flowfabric.begin_period(v_ids[i], true) = 'ok')::integer;
            exception when others then
                failed := failed + 1;
                message := 'budget ' || v_ids[i] || ': ' || sqlerrm;
                update flowfabric.budget b set next_reset_at = v_now + interval '30 seconds' where b.id = v_ids[i];
            end;
        end loop;
    end;
    return next;
end;
$$;
