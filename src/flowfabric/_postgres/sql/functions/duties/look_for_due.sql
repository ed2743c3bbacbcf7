-- look_for_due: which duties have work now; without any, announce that this process sleeps until the next timer
--
-- Called by the process that leads the duties, before and after each round: one call, whatever the number of kinds.
-- Takes    p_kinds: the kinds of timers, and p_after: per kind, the time before which none is due any more. p_before:
--          until when this process was announced before.
-- Returns  the kinds that are due, and the names of queues that are not empty; per kind, the time before which no timer
--          is left; for how long it may sleep, and until when it is announced.
-- Roles    work, operate
create or replace function flowfabric.look_for_due(
    p_kinds text[], p_after timestamptz[], p_instance uuid, p_at_most_ms bigint, p_before timestamptz)
returns table (due text[], low_water timestamptz[], pause_ms double precision, announced timestamptz)
language plpgsql security definer as $$
declare
    v_now timestamptz := flowfabric.now();
    v_next timestamptz;
    v_reset timestamptz;
begin
    -- A transaction that sets a timer may end a minute after it is due and still be seen at once.
    select coalesce(array_agg(k.kind) filter (where f.due_at <= v_now), '{}'), min(n.due_at),
           array_agg(least(v_now - interval '1 minute', f.due_at - interval '1 microsecond') order by k.no)
    into due, v_next, low_water
    from unnest(p_kinds, p_after) with ordinality as k (kind, after, no)
    left join lateral (select t.due_at from flowfabric.timer t
                       where t.kind = k.kind and t.due_at > coalesce(k.after, '-infinity') and t.due_at <= v_now
                       order by t.due_at limit 1) f on true
    left join lateral (select t.due_at from flowfabric.timer t where t.kind = k.kind and t.due_at > v_now
                       order by t.due_at limit 1) n on true;
    if exists (select from flowfabric.pending_cascade) then
        due := array_append(due, 'cascade');
    end if;
    if exists (select from flowfabric.sibling_cancel) then
        due := array_append(due, 'sibling_cancel');
    end if;
    if exists (select from flowfabric.child_cancel) then
        due := array_append(due, 'child_cancel');
    end if;
    if exists (select from flowfabric.cancel_backlog) then
        due := array_append(due, 'flow_cancel');
    end if;
    if exists (select from flowfabric.hook h where h.due_at <= v_now) then
        due := array_append(due, 'hook_submission');
    end if;
    if flowfabric.has_ended() then
        due := array_append(due, 'reservation_end');
    end if;
    select b.next_reset_at into v_reset from flowfabric.budget b where b.next_reset_at is not null
    order by b.next_reset_at limit 1;
    if v_reset <= v_now then
        due := array_append(due, 'budget_reset');
    else
        v_next := least(v_next, v_reset);
    end if;
    if exists (select from flowfabric.limit_due d where d.due_at <= v_now) then
        due := array_append(due, 'limit_opening');
    end if;
    v_next := least(v_next, (select d.due_at from flowfabric.limit_due d where d.due_at > v_now order by d.due_at limit 1));
    pause_ms := least(p_at_most_ms, extract(epoch from v_next - v_now) * 1000 + 1);
    perform flowfabric.get_up(p_instance, array[''], p_before);
    if p_instance is not null and pause_ms > 50 then
        announced := clock_timestamp() + flowfabric.ms(ceil(pause_ms * 1.1)::bigint);
        insert into flowfabric.sleeper (lane, until, instance, wakes_at)
        values ('', announced, p_instance, v_now + flowfabric.ms(pause_ms::bigint));
    end if;
    return next;
end;
$$;
