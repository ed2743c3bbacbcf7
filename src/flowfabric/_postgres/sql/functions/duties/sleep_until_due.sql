-- sleep_until_due: announce that a duty runner sleeps; returns for how long it may.
--
-- Called after a round. Timers that are still due were skipped by that round, because of a filter or a lock of another
-- transaction, and can wait for the next one.
create or replace function flowfabric.sleep_until_due(p_kinds text[], p_instance uuid, p_at_most_ms bigint)
returns table (pause_ms double precision)
language plpgsql security definer as $$
declare
    v_now timestamptz := flowfabric.now();
    v_due timestamptz;
begin
    select min(f.due_at) into v_due from unnest(p_kinds) k (kind)
    cross join lateral (select t.due_at from flowfabric.timer t where t.kind = k.kind and t.due_at > v_now
                        order by t.due_at limit 1) f;
    pause_ms := least(p_at_most_ms, extract(epoch from v_due - v_now) * 1000 + 1);
    if p_instance is not null and pause_ms > 50 then
        perform flowfabric.sleep(p_instance, 'timer', ceil(pause_ms * 1.1)::bigint, v_now + flowfabric.ms(pause_ms));
    end if;
    return next;
end;
$$;
