-- settle_wait: the outcome of a wait so far, recorded once it is final
--
-- Called by the lease holder, before it continues to wait; or, with p_give_up, when it does not: that ends an open wait.
-- Takes    p_schema: the JSON schema of payloads, or null. An open wait stores it, if its type changed or was not known before.
-- Locks    the execution.
-- Returns  one verdict; with ok the outcome: open, resumed, timed_out, operator_resumed or given_up, its record, and
--          the number of signals that each waitpoint has received.
-- Roles    work, operate
create or replace function flowfabric.settle_wait(
    p_partition integer, p_id uuid, p_lease uuid, p_epoch bigint, p_attempt uuid, p_index integer, p_name text,
    p_n integer, p_suspension uuid, p_condition text, p_reason text, p_deadline timestamptz, p_give_up boolean, p_schema text)
returns table (ordinal integer, code text, detail text, state text, lease_epoch bigint, attempt_id uuid, at timestamptz,
               outcome text, result bytea, seen integer[])
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_held flowfabric.verdict;
    t flowfabric.step;
    e flowfabric.execution;
    v_condition jsonb := p_condition::jsonb;
    b record;   -- the checked bindings
    v record;   -- the evaluation of the signals so far
    v_detail text;
    v_schema text;
    v_is_open boolean := false;
begin
    perform flowfabric.require_read_committed();
    v_held := flowfabric.hold_one(p_partition, p_id, p_lease, p_epoch, p_attempt, p_index);
    if v_held.code is not null then
        return query select v_held.*, null::text, null::bytea, null::integer[];
        return;
    end if;
    v_now := v_held.at;
    select x.* into t from flowfabric.execution e
    join flowfabric.step x on x.partition = e.partition and x.id = e.id and x.generation = e.generation and x.kind = 'wait'
         and x.name = p_name and x.n = p_n
    where e.partition = p_partition and e.id = p_id;
    if t.id is null then
        return query select 1, 'waitpoint_not_found', null::text, 'active', p_epoch, p_attempt, v_now, null::text,
                            null::bytea, null::integer[];
        return;
    end if;
    if t.outcome is null then
        select w.state = 'pending', w.payload_schema into v_is_open, v_schema from flowfabric.waitpoint w
        where w.partition = p_partition and w.waitpoint_id = t.waitpoint_ids[1];
    end if;
    if v_is_open then
        if v_schema is distinct from p_schema then
            update flowfabric.waitpoint w set payload_schema = p_schema
            from unnest(t.waitpoint_ids) as u (waitpoint_id)
            cross join lateral (select x.ctid as tid from flowfabric.waitpoint x
                                where x.partition = p_partition and x.waitpoint_id = u.waitpoint_id offset 0) f
            where w.ctid = f.tid;
        end if;
        select x.* into e from flowfabric.execution x where x.partition = p_partition and x.id = p_id;
        select c.* into b from flowfabric.check_bindings(
            e, t.waitpoint_ids, array_fill(null::text, array[cardinality(t.waitpoint_ids)]), v_condition, v_now) c;
        if b.code is null then
            select c.* into v from flowfabric.evaluate(p_partition, t.waitpoint_ids, v_condition) c;
            if (v.weighed).closer is not null then
                perform flowfabric.write_suspension(
                    e, p_suspension, t.waitpoint_ids, b.keys, null, b.pending, v_condition, '{}', p_reason, 'worker', null,
                    null, null, null, v.signals, v.weighed, v_now);
            end if;
        end if;
        v_detail := case when b.code = 'invalid_input' then b.detail end;
        if v_detail is not null then   -- the condition has other keys: the code changed
            return query select 1, 'invalid_input', v_detail, 'active', p_epoch, p_attempt, v_now, null::text,
                                null::bytea, null::integer[];
            return;
        end if;
        select x.* into t from flowfabric.step x
        where x.partition = t.partition and x.id = t.id and x.generation = t.generation and x.kind = 'wait'
          and x.name = t.name and x.n = t.n;
        if t.outcome is null and (p_give_up or p_deadline <= v_now) then
            v_detail := case when p_give_up then 'given_up' else 'timed_out_auto_resume' end;
            update flowfabric.waitpoint w set state = 'closed', closed_at = v_now, close_reason = v_detail
            where w.partition = p_partition and w.waitpoint_id = any (t.waitpoint_ids) and w.state = 'pending';
            perform flowfabric.remember_wait(p_partition, p_id, t.waitpoint_ids, v_detail, null);
            t.outcome := case when p_give_up then 'given_up' else 'timed_out' end;
        end if;
    end if;
    if p_give_up and t.outcome <> 'given_up' then
        -- Signals arrived, but the handler took another branch before it received them.
        update flowfabric.step x set outcome = 'given_up', result = null
        where x.partition = t.partition and x.id = t.id and x.generation = t.generation and x.kind = 'wait'
          and x.name = t.name and x.n = t.n;
        t.outcome := 'given_up';
    end if;
    return query
    select 1, 'ok', null::text, 'active', null::bigint, null::uuid, t.at, coalesce(t.outcome, 'open'), t.result,
           array_agg(w.signal_count order by u.place)
    from unnest(t.waitpoint_ids) with ordinality as u (waitpoint_id, place)
    cross join lateral (select x.signal_count from flowfabric.waitpoint x
                        where x.partition = p_partition and x.waitpoint_id = u.waitpoint_id offset 0) w;
end;
$$;
