-- refuse_signals: set signals aside that do not fit the wait they ended; the wait is open again
--
-- Called by the lease holder, whose handler cannot read their payloads. They count for no condition and no source any more, and
-- their senders may answer again: the waitpoints are pending again, under the same ids and tokens. The other signals of the
-- wait stay. The suspension that they ended is closed as refused, and has no satisfiers.
-- Takes    the name and number of the wait, the ids of the signals, and per signal why, in words without the payload.
-- Locks    the execution.
-- Returns  one verdict: ok, even if they were set aside before; waitpoint_not_found without such a wait, invalid_input for
--          a signal that is not one of its.
-- Roles    work, operate
create or replace function flowfabric.refuse_signals(
    p_partition integer, p_id uuid, p_lease uuid, p_epoch bigint, p_attempt uuid, p_index integer, p_name text,
    p_n integer, p_signals uuid[], p_why text[])
returns setof flowfabric.verdict
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_held flowfabric.verdict;
    v_now timestamptz;
    t flowfabric.step;
    e flowfabric.execution;
    g record;
    v_schema text;
begin
    perform flowfabric.require_read_committed();
    v_held := flowfabric.hold_one(p_partition, p_id, p_lease, p_epoch, p_attempt, p_index);
    if v_held.code is not null then
        return next v_held;
        return;
    end if;
    v_now := v_held.at;
    select x.* into e from flowfabric.execution x where x.partition = p_partition and x.id = p_id;
    select x.* into t from flowfabric.step x
    where x.partition = p_partition and x.id = p_id and x.generation = e.generation and x.kind = 'wait' and x.name = p_name
      and x.n = p_n;
    if t.id is null then
        return query select 1, 'waitpoint_not_found', null::text, 'active', p_epoch, p_attempt, v_now;
        return;
    end if;
    if exists (select from unnest(p_signals) as u (signal_id)
               left join lateral (select x.waitpoint_id from flowfabric.signal x
                                  where x.signal_id = u.signal_id
                                    and (x.partition, x.id) is not distinct from (p_partition, p_id) offset 0) x on true
               where x.waitpoint_id is null or x.waitpoint_id <> all (t.waitpoint_ids)) then
        return query select 1, 'invalid_input', 'signal_not_of_this_wait', 'active', p_epoch, p_attempt, v_now;
        return;
    end if;
    for g in
        update flowfabric.signal s
        set refused = u.why, observed_effect = 'refused', match_detail = 'refused', source_hash = null
        from unnest(p_signals, p_why) as u (signal_id, why)
        cross join lateral (select x.ctid as tid from flowfabric.signal x
                            where x.signal_id = u.signal_id and (x.partition, x.id) is not distinct from (p_partition, p_id)
                              and x.refused is null offset 0) f
        where s.ctid = f.tid
        returning s.signal_id, s.waitpoint_id, s.source_identity, s.ordinal
    loop
        update flowfabric.waitpoint w set refused_signal_count = w.refused_signal_count + 1
        where w.partition = p_partition and w.waitpoint_id = g.waitpoint_id;
        perform flowfabric.log_signal(e.partition, e.id, e.route, e.flow_id, e.namespace, e.tags, 'refused', g.signal_id, g.waitpoint_id,
                                      g.source_identity, v_now);
    end loop;
    if t.outcome = 'resumed' then
        update flowfabric.suspension s
        set close_reason = 'refused', closer_signal_id = null, satisfier_signal_ids = null, satisfied_at = null
        where s.partition = p_partition and s.id = p_id and s.closed_at is not null
          and s.satisfier_signal_ids && p_signals;
        v_schema := (select w.payload_schema from flowfabric.waitpoint w
                     where w.partition = p_partition and w.waitpoint_id = t.waitpoint_ids[1]);
        perform flowfabric.reopen_waitpoints(p_partition, p_id, t.waitpoint_ids, v_schema, false, v_now);
        update flowfabric.step x set outcome = null, result = null, is_unread = false
        where x.partition = t.partition and x.id = t.id and x.generation = t.generation and x.kind = 'wait'
          and x.name = t.name and x.n = t.n;
    end if;
    return query select 1, 'ok', null::text, 'active', null::bigint, null::uuid, v_now;
end;
$$;
