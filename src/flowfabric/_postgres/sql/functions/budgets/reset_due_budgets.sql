-- reset_due_budgets: reset the budgets whose period has ended, the earliest first
--
-- Called by the duty. Periods that were missed are one reset.
-- Locks    each budget in turn, skipping those that are locked.
-- Returns  how many were reset, whether more are due, and when the next is.
-- Roles    work, operate
create or replace function flowfabric.reset_due_budgets(p_limit integer)
returns table (handled integer, more boolean, next_reset_at timestamptz)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz := flowfabric.now();
    v_id uuid;
    v_seen integer := 0;
begin
    perform flowfabric.require_read_committed();
    handled := 0;
    for v_id in select b.id from flowfabric.budget b where b.next_reset_at <= v_now
                order by b.next_reset_at limit least(p_limit, 1000) for no key update skip locked loop
        v_seen := v_seen + 1;
        if flowfabric.begin_period(v_id, true) = 'ok' then
            handled := handled + 1;
        end if;
    end loop;
    more := v_seen >= p_limit;
    select b.next_reset_at into next_reset_at from flowfabric.budget b where b.next_reset_at is not null
    order by b.next_reset_at limit 1;
    return next;
end;
$$;
