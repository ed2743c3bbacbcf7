-- look_for_due: which duties have work now; without any, announce that this process sleeps until the next timer
--
-- Called by the process that leads the duties, before and after each round: one call, whatever the number of kinds.
-- Takes    p_kinds: kinds of timers and names of queues, and p_after: for each, the time before which no timer and no row is
--          left: what was deleted stays in the index while an old snapshot lives. p_before: until when this process was
--          announced before.
-- Returns  those that have work; for each of p_kinds, the time before which nothing is left; for how long the process may
--          sleep, and until when it is announced.
-- Roles    work, operate
create or replace function flowfabric.look_for_due(
    p_kinds text[], p_after timestamptz[], p_instance uuid, p_at_most_ms bigint, p_before timestamptz)
returns table (due text[], low_water timestamptz[], pause_ms double precision, announced timestamptz)
language plpgsql security definer as $$
declare
    v_now timestamptz := flowfabric.now();
    v_next timestamptz;
begin
    -- A transaction that sets a timer, or leaves a row, may end a minute later and still be seen at once.
    select coalesce(array_agg(k.kind) filter (where f.at is not null), '{}'), min(n.at),
           array_agg(least(v_now - interval '1 minute', f.at - interval '1 microsecond') order by k.no)
    into due, v_next, low_water
    from (select u.kind, coalesce(u.after, '-infinity') as after, u.no
          from unnest(p_kinds, p_after) with ordinality as u (kind, after, no)) k
    left join lateral flowfabric.first_due(k.kind, k.after, v_now) f (at) on true
    left join lateral flowfabric.next_after(k.kind, v_now) n (at) on true;
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

-- first_due: the time of the first timer of a kind, or the first row of a queue, that is due and later than p_after.
--
-- Cascades and cancels of siblings and children are due at once, even if the clock of the server was set back.
create or replace function flowfabric.first_due(p_kind text, p_after timestamptz, p_now timestamptz) returns timestamptz
language plpgsql stable as $$
begin
    case p_kind
    when 'cascade' then
        return (select x.enqueued_at from flowfabric.pending_cascade x where x.enqueued_at > p_after
                order by x.enqueued_at limit 1);
    when 'sibling_cancel' then
        return (select x.due_at from flowfabric.sibling_cancel x where x.due_at > p_after
                order by x.due_at limit 1);
    when 'child_cancel' then
        return (select x.due_at from flowfabric.child_cancel x where x.due_at > p_after
                order by x.due_at limit 1);
    when 'flow_cancel' then
        return (select x.grace_until from flowfabric.cancel_backlog x where x.grace_until > p_after and x.grace_until <= p_now
                order by x.grace_until limit 1);
    when 'hook_submission' then
        return (select x.due_at from flowfabric.hook x where x.due_at > p_after and x.due_at <= p_now
                order by x.due_at limit 1);
    when 'budget_reset' then
        return (select x.next_reset_at from flowfabric.budget x where x.next_reset_at > p_after and x.next_reset_at <= p_now
                order by x.next_reset_at limit 1);
    when 'limit_opening' then
        return (select x.due_at from flowfabric.limit_due x where x.due_at > p_after and x.due_at <= p_now
                order by x.due_at limit 1);
    when 'reservation_end' then
        return flowfabric.first_ended(p_after);
    else
        return (select x.due_at from flowfabric.timer x where x.kind = p_kind and x.due_at > p_after and x.due_at <= p_now
                order by x.due_at limit 1);
    end case;
end;
$$;

-- next_after: when the next timer of a kind, or the next row of a queue, is due that is not due now.
create or replace function flowfabric.next_after(p_kind text, p_now timestamptz) returns timestamptz
language plpgsql stable as $$
begin
    case p_kind
    when 'flow_cancel' then
        return (select x.grace_until from flowfabric.cancel_backlog x where x.grace_until > p_now order by x.grace_until limit 1);
    when 'hook_submission' then
        return (select x.due_at from flowfabric.hook x where x.due_at > p_now order by x.due_at limit 1);
    when 'budget_reset' then
        return (select x.next_reset_at from flowfabric.budget x where x.next_reset_at > p_now order by x.next_reset_at limit 1);
    when 'limit_opening' then
        return (select x.due_at from flowfabric.limit_due x where x.due_at > p_now order by x.due_at limit 1);
    when 'cascade', 'sibling_cancel', 'child_cancel', 'reservation_end' then
        return null;   -- due at once
    else
        return (select x.due_at from flowfabric.timer x where x.kind = p_kind and x.due_at > p_now order by x.due_at limit 1);
    end case;
end;
$$;
