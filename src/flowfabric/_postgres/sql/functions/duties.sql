-- Duties: what happens when a time has come. One driver for all kinds; what differs is whose time it is (own_time)
-- and what is done (act).

-- own_time: when this execution is really due for a kind of timer; null when it no longer is.
create or replace function flowfabric.own_time(p_kind text, e flowfabric.execution, d flowfabric.deployment)
returns timestamptz
language sql immutable as $$
    select case p_kind
        when 'lease' then case when e.state = 'active' and e.lease_lost is null then e.lease_expires_at end
        when 'attempt' then case when e.state = 'active' then e.attempt_timeout_at end
        when 'deadline' then case when e.completed_at is null then e.deadline_at end
        when 'delay' then case when e.state = 'delayed' and e.delay_until < flowfabric.far_date() then e.delay_until end
        when 'parked' then case when flowfabric.is_parked(e) then timestamptz '-infinity' end
        when 'suspension' then case when e.state = 'suspended' then e.suspension_timeout_at end
        when 'waitpoint' then case when e.has_waitpoints and e.completed_at is null then timestamptz '-infinity' end
        when 'retention' then e.completed_at + flowfabric.retention_of(e.state, e.policy, d)
    end
$$;

-- retention_of: how long an ended execution is kept.
create or replace function flowfabric.retention_of(p_state text, p_policy jsonb, d flowfabric.deployment) returns interval
language sql immutable as $$
    select coalesce(flowfabric.ms((p_policy -> 'stream_policy' ->> 'retention_ttl_ms')::bigint),
                    case when p_state in ('failed', 'expired') then d.failure_retention else d.retention end)
$$;

-- due_executions: take due timers, lock what they point at, give out what is really due and set the rest again.
--
-- Locks    timers, then executions, skipping what is locked.
create or replace function flowfabric.due_executions(
    p_kind text, p_limit integer, p_after timestamptz, p_namespace text, p_tag_key text, p_tag_value text,
    p_now timestamptz)
returns flowfabric.due
language plpgsql as $$
declare
    v_partitions integer[]; v_ids uuid[]; v_due timestamptz[];
    v_locked_partitions integer[]; v_locked_ids uuid[]; v_locked_due timestamptz[];
    v_own timestamptz[]; v_ours boolean[];
    v_seen integer; v_chosen integer;
    v_answer flowfabric.due;
begin
    -- As many timers as point at p_limit executions, at least one. With a filter, only timers that concern us: what
    -- belongs to others is neither touched nor in the way.
    with head as materialized (
        select t.ctid as tid, cardinality(t.ids) as n, t.due_at from flowfabric.timer t
        where t.kind = p_kind and t.due_at <= p_now and t.due_at > coalesce(p_after, '-infinity')
          and ((p_namespace is null and p_tag_key is null)
               or exists (select from unnest(t.partitions, t.ids) as u (partition, id)
                          join flowfabric.execution e on e.partition = u.partition and e.id = u.id
                          where (p_namespace is null or e.namespace = p_namespace)
                            and (p_tag_key is null or coalesce(e.tags ->> p_tag_key = p_tag_value, false))))
        order by t.due_at limit p_limit
    ), counted as (
        select h.tid, sum(h.n) over (order by h.due_at, h.tid) - h.n as before from head h
    ), chosen as materialized (
        select t.ctid as tid from counted c join flowfabric.timer t on t.ctid = c.tid
        where c.before < p_limit
        for update of t skip locked
    ), taken as (
        delete from flowfabric.timer t using chosen c where t.ctid = c.tid
        returning t.due_at, t.partitions, t.ids
    ), pointed as (
        select u.partition, u.id, min(t.due_at) as due
        from taken t cross join lateral unnest(t.partitions, t.ids) as u (partition, id) group by u.partition, u.id
    )
    select array_agg(p.partition order by p.partition, p.id), array_agg(p.id order by p.partition, p.id),
           array_agg(p.due order by p.partition, p.id), (select count(*) from head), (select count(*) from chosen),
           (select max(t.due_at) from taken t)
    into v_partitions, v_ids, v_due, v_seen, v_chosen, v_answer.last_due_at
    from pointed p;
    v_answer.more := v_chosen > 0 and (v_seen > v_chosen or v_seen = p_limit);
    if v_ids is null then
        v_answer.partitions := '{}'; v_answer.ids := '{}';
        return v_answer;
    end if;

    with locked as materialized (
        select e.partition, e.id, u.due, flowfabric.own_time(p_kind, e, d) as own,
               (p_namespace is null or e.namespace = p_namespace)
               and (p_tag_key is null or coalesce(e.tags ->> p_tag_key = p_tag_value, false)) as ours
        from unnest(v_partitions, v_ids, v_due) as u (partition, id, due)
        join flowfabric.execution e on e.partition = u.partition and e.id = u.id
        cross join flowfabric.deployment d
        for no key update of e skip locked
    )
    select array_agg(l.partition), array_agg(l.id), array_agg(l.due), array_agg(l.own), array_agg(l.ours)
    into v_locked_partitions, v_locked_ids, v_locked_due, v_own, v_ours
    from locked l;

    with locked as (
        select * from unnest(v_locked_partitions, v_locked_ids, v_locked_due, v_own, v_ours)
            as l (partition, id, due, own, ours)
    ), missed as (
        select * from unnest(v_partitions, v_ids, v_due) as u (partition, id, due)
        except
        select l.partition, l.id, l.due from locked l
    ), later as (
        -- Not yet due: at its own time. Not ours, or in somebody else's hands: as before.
        select l.partition, l.id, case when l.ours then l.own else l.due end as due
        from locked l where l.own > p_now or (l.own is not null and not l.ours)
        union all
        select m.partition, m.id, m.due from missed m
        where exists (select from flowfabric.execution e where e.partition = m.partition and e.id = m.id)
    ), again as (
        insert into flowfabric.timer (kind, due_at, partitions, ids)
        select p_kind, l.due, array_agg(l.partition), array_agg(l.id) from later l group by l.due
    )
    select coalesce(array_agg(l.partition), '{}'), coalesce(array_agg(l.id), '{}')
    into v_answer.partitions, v_answer.ids
    from locked l where l.ours and l.own <= p_now;
    return v_answer;
end;
$$;

-- act: do what a kind of timer is for, on executions that are locked and due.
create or replace function flowfabric.act(p_kind text, p_partition integer[], p_id uuid[], p_now timestamptz)
returns void
language plpgsql as $$
begin
    case p_kind
        when 'lease' then perform flowfabric.mark_expired(p_partition, p_id, p_now);
        when 'attempt' then perform flowfabric.time_out_attempts(p_partition, p_id, p_now);
        when 'deadline' then perform flowfabric.pass_deadlines(p_partition, p_id, p_now);
        when 'delay', 'parked' then perform flowfabric.promote(p_partition, p_id, p_now);
        when 'suspension' then perform flowfabric.expire_suspensions(p_partition, p_id, p_now);
        when 'waitpoint' then perform flowfabric.expire_waitpoints(p_partition, p_id, p_now);
        when 'retention' then perform flowfabric.purge(p_partition, p_id, p_now);
    end case;
end;
$$;

-- run_timers: one round of one duty.
--
-- A round that fails as a whole is redone one by one; what fails alone is put off for p_backoff_ms and reported.
-- Answers  how many were handled, how many failed with the last message, whether more timers are due behind them.
create or replace function flowfabric.run_timers(
    p_kind text, p_limit integer, p_after timestamptz, p_namespace text, p_tag_key text, p_tag_value text,
    p_backoff_ms bigint)
returns table (handled integer, failed integer, message text, more boolean, last_due_at timestamptz)
language plpgsql security definer set search_path = flowfabric, pg_temp
set enable_hashjoin = off set enable_mergejoin = off as $$
declare
    v_now timestamptz := flowfabric.now();
    v_due flowfabric.due;
begin
    v_due := flowfabric.due_executions(p_kind, p_limit, p_after, p_namespace, p_tag_key, p_tag_value, v_now);
    v_now := flowfabric.now();   -- not before anything that was seen under the locks
    handled := cardinality(v_due.ids); failed := 0; more := v_due.more; last_due_at := v_due.last_due_at;
    if handled > 0 then
        begin
            perform flowfabric.act(p_kind, v_due.partitions, v_due.ids, v_now);
        exception
        when serialization_failure or deadlock_detected then
            raise;   -- nobody's fault: the whole round is done again
        when others then
            handled := 0;
            for i in 1 .. cardinality(v_due.ids) loop
                begin
                    perform flowfabric.act(p_kind, array[v_due.partitions[i]], array[v_due.ids[i]], v_now);
                    handled := handled + 1;
                exception when others then
                    failed := failed + 1;
                    message := sqlerrm;
                    insert into flowfabric.timer (kind, due_at, partitions, ids)
                    values (p_kind, v_now + flowfabric.ms(p_backoff_ms), array[v_due.partitions[i]], array[v_due.ids[i]]);
                end;
            end loop;
        end;
    end if;
    return next;
end;
$$;

-- run_one: one duty on one execution, whatever its timers say.
--
-- Locks    the execution.
-- Answers  'done', or why there was nothing to do: not_found, not_yet_due, or the state that stands in the way.
create or replace function flowfabric.run_one(p_kind text, p_partition integer, p_id uuid)
returns table (code text, state text, lease_lost text)
language plpgsql security definer set search_path = flowfabric, pg_temp as $$
declare
    v_now timestamptz;
    v_own timestamptz;
    e flowfabric.execution;
begin
    select x.* into e from flowfabric.execution x where x.partition = p_partition and x.id = p_id for no key update;
    v_now := flowfabric.now();
    select flowfabric.own_time(p_kind, e, d) into v_own from flowfabric.deployment d;
    code := case when e.id is null then 'not_found'
                 when v_own is null then 'not_applicable'
                 when v_own > v_now then 'not_yet_due' else 'done' end;
    state := e.state; lease_lost := e.lease_lost;
    if code = 'done' then
        perform flowfabric.act(p_kind, array[p_partition], array[p_id], v_now);
        select x.state, x.lease_lost into state, lease_lost
        from flowfabric.execution x where x.partition = p_partition and x.id = p_id;
    end if;
    return next;
end;
$$;

-- time_out_attempts: the attempt ran too long: another attempt, or the end.
create or replace function flowfabric.time_out_attempts(p_partition integer[], p_id uuid[], p_now timestamptz)
returns void
language plpgsql as $$
declare
    v_delay bigint[];
begin
    select array_agg(flowfabric.retry_delay_ms(e.policy -> 'retry_policy', e.retries, 'timeout', 'timeout') order by u.ord)
    into v_delay
    from unnest(p_partition, p_id) with ordinality as u (partition, id, ord)
    join flowfabric.execution e on e.partition = u.partition and e.id = u.id;
    perform flowfabric.tell_holders(p_partition, p_id);
    perform flowfabric.schedule_retries(
        array_agg(u.partition), array_agg(u.id), array_agg('attempt_timeout'::text), array_agg('timeout'::text),
        array_agg(u.delay), 'expired:attempt_timeout', 'reconciler', p_now)
    from unnest(p_partition, p_id, v_delay) as u (partition, id, delay) where u.delay is not null having count(*) > 0;
    perform flowfabric.end_executions(
        array_agg(u.partition), array_agg(u.id), null, 'expired', 'ended_failure', 'expired', null, null,
        array_agg('attempt_timeout'::text), array_agg('timeout'::text), null, null,
        'expired:attempt_timeout', 'reconciler', false, p_now)
    from unnest(p_partition, p_id, v_delay) as u (partition, id, delay) where u.delay is null having count(*) > 0;
end;
$$;

-- pass_deadlines: the execution took too long as a whole, whatever it is doing.
create or replace function flowfabric.pass_deadlines(p_partition integer[], p_id uuid[], p_now timestamptz)
returns void
language plpgsql as $$
begin
    perform flowfabric.end_executions(
        p_partition, p_id, null, 'expired', 'ended_failure', 'expired', null, null,
        array_fill('execution_deadline'::text, array[cardinality(p_id)]),
        array_fill('timeout'::text, array[cardinality(p_id)]),
        null, null, 'expired:execution_deadline', 'reconciler', false, p_now);
end;
$$;

-- promote: delayed -> waiting, or resumable after a suspension; which attempt comes next is unchanged. Whatever else it
-- waited for is forgotten.
create or replace function flowfabric.promote(p_partition integer[], p_id uuid[], p_now timestamptz) returns void
language plpgsql as $$
begin
    update flowfabric.execution e
    set state = case when e.resume_pending then 'resumable' else 'waiting' end, blocking_reason = 'waiting_for_worker',
        blocking_detail = null, delay_until = null, transitioned_at = p_now, mutated_at = p_now
    from unnest(p_partition, p_id) as u (partition, id)
    where e.partition = u.partition and e.id = u.id;
    perform flowfabric.forget_waits(p_partition, p_id);
    perform flowfabric.make_ready(p_partition, p_id, null);
end;
$$;

-- purge: forget ended executions whose time is over. A flow goes as a whole, when the time of all its members is over;
-- until then its members are looked at again.
create or replace function flowfabric.purge(p_partition integer[], p_id uuid[], p_now timestamptz) returns void
language plpgsql as $$
declare
    v_partitions integer[]; v_flows uuid[]; v_due timestamptz[];
    v_kept uuid[] := '{}';
begin
    -- When a flow may go: null while a member has not ended or something is still to be done for it.
    select array_agg(f.partition), array_agg(f.flow_id), array_agg(f.due) into v_partitions, v_flows, v_due
    from (select w.partition, w.flow_id,
                 case when not m.live and not exists (select from flowfabric.pending_cascade p where p.flow_id = w.flow_id)
                      then m.due end as due
          from (select distinct e.partition, e.flow_id from unnest(p_partition, p_id) as u (partition, id)
                join flowfabric.execution e on e.partition = u.partition and e.id = u.id where e.flow_id is not null) w
          cross join lateral (
              select bool_or(e.completed_at is null) as live, max(flowfabric.own_time('retention', e, d)) as due
              from flowfabric.execution e, flowfabric.deployment d where e.flow_id = w.flow_id offset 0) m) f;
    if v_flows is not null then
        select coalesce(array_agg(e.id), '{}') into v_kept
        from unnest(p_partition, p_id) as u (partition, id)
        join flowfabric.execution e on e.partition = u.partition and e.id = u.id where e.flow_id is not null;
        perform flowfabric.set_timers(
            'retention', array_agg(e.partition), array_agg(e.id),
            array_agg(coalesce(nullif(greatest(f.due, p_now), p_now), p_now + interval '1 hour')))
        from unnest(p_partition, p_id) as u (partition, id)
        join flowfabric.execution e on e.partition = u.partition and e.id = u.id
        join unnest(v_flows, v_due) as f (flow_id, due) on f.flow_id = e.flow_id
        where f.due is null or f.due > p_now having count(*) > 0;
        for v_no in 1 .. cardinality(v_flows) loop
            if v_due[v_no] <= p_now and flowfabric.forget_flow(v_partitions[v_no], v_flows[v_no]) <> 'ok' then
                perform flowfabric.set_timers('retention', array_agg(e.partition), array_agg(e.id), array_agg(p_now + interval '1 minute'))
                from unnest(p_partition, p_id) as u (partition, id)
                join flowfabric.execution e on e.partition = u.partition and e.id = u.id and e.flow_id = v_flows[v_no];
            end if;
        end loop;
    end if;
    perform flowfabric.purge_rows(array_agg(u.partition), array_agg(u.id))
    from unnest(p_partition, p_id) as u (partition, id) where u.id <> all (v_kept) having count(*) > 0;
end;
$$;

-- purge_rows: forget ended executions and everything they own. Events and idempotency records live out their own time.
create or replace function flowfabric.purge_rows(p_partition integer[], p_id uuid[]) returns void
language plpgsql as $$
begin
    delete from flowfabric.injected_input i using unnest(p_partition, p_id) as u (partition, id)
    where i.partition = u.partition and i.id = u.id;
    delete from flowfabric.attempt a using unnest(p_partition, p_id) as u (partition, id)
    where a.partition = u.partition and a.id = u.id;
    delete from flowfabric.step s using unnest(p_partition, p_id) as u (partition, id)
    where s.partition = u.partition and s.id = u.id;
    if exists (select from unnest(p_partition, p_id) as u (partition, id)
               join flowfabric.execution e on e.partition = u.partition and e.id = u.id where e.has_waitpoints) then
        delete from flowfabric.signal s using unnest(p_partition, p_id) as u (partition, id)
        where s.partition = u.partition and s.id = u.id;
        delete from flowfabric.suspension s using unnest(p_partition, p_id) as u (partition, id)
        where s.partition = u.partition and s.id = u.id;
        delete from flowfabric.waitpoint w using unnest(p_partition, p_id) as u (partition, id)
        where w.partition = u.partition and w.id = u.id;
    end if;
    delete from flowfabric.tag t
    using (select e.partition, e.id, e.created_at, flowfabric.tag_digest(k.key, k.value) as digest
           from unnest(p_partition, p_id) as u (partition, id)
           join flowfabric.execution e on e.partition = u.partition and e.id = u.id
           cross join lateral jsonb_each_text(e.tags) as k (key, value)) g
    where t.digest = g.digest and t.created_at = g.created_at and t.id = g.id and t.partition = g.partition;
    delete from flowfabric.unsuccessful w
    using unnest(p_partition, p_id) as u (partition, id)
    join flowfabric.execution e on e.partition = u.partition and e.id = u.id
    where w.state = e.state and w.created_at = e.created_at and w.id = e.id and w.partition = e.partition;
    delete from flowfabric.execution e using unnest(p_partition, p_id) as u (partition, id)
    where e.partition = u.partition and e.id = u.id;
end;
$$;

-- sweep: remove idempotency records, grants and watches whose time is over, empty flows, and event segments past their
-- retention.
create or replace function flowfabric.sweep(p_limit integer) returns integer
language plpgsql security definer set search_path = flowfabric, pg_temp as $$
declare
    v_now timestamptz := flowfabric.now();
    v_n integer;
    v_sum integer := 0;
begin
    delete from flowfabric.idempotency i using (
        select x.ctid as tid from flowfabric.idempotency x where x.expires_at <= v_now
        order by x.expires_at limit p_limit for update skip locked) old
    where i.ctid = old.tid;
    get diagnostics v_n = row_count;
    v_sum := v_n;
    delete from flowfabric.claim_grant g using (
        select x.ctid as tid from flowfabric.claim_grant x where x.expires_at <= v_now
        order by x.expires_at limit p_limit for update skip locked) old
    where g.ctid = old.tid;
    get diagnostics v_n = row_count;
    v_sum := v_sum + v_n;
    delete from flowfabric.watch w using (
        select x.ctid as tid from flowfabric.watch x where x.until < clock_timestamp() - interval '1 minute'
        limit p_limit for update skip locked) old
    where w.ctid = old.tid;
    get diagnostics v_n = row_count;
    v_sum := v_sum + v_n;
    -- Flows that nothing was ever put into.
    delete from flowfabric.flow f using (
        select x.ctid as tid from flowfabric.flow x, flowfabric.deployment d
        where x.node_count = 0 and x.last_mutation_at <= v_now - d.failure_retention
        limit p_limit for update of x skip locked) old
    where f.ctid = old.tid;
    get diagnostics v_n = row_count;
    return v_sum + v_n + flowfabric.purge_keys(v_now) + flowfabric.trim_events(v_now);
end;
$$;

-- trim_events: empty every segment of the ring whose youngest event is older than the retention.
create or replace function flowfabric.trim_events(p_now timestamptz) returns integer
language plpgsql set lock_timeout = '200ms' as $$
declare
    v_cutoff timestamptz;
    v_last timestamptz;
    v_n integer := 0;
begin
    select p_now - d.event_retention into v_cutoff from flowfabric.deployment d;
    for v_slot in 0 .. 7 loop
        continue when v_slot = flowfabric.event_slot(p_now);
        -- The last event of a segment is its youngest, give or take calls that ran side by side.
        select e.occurred_at into v_last from flowfabric.event e where e.slot = v_slot
        order by e.seq desc limit 1;
        continue when v_last is null or v_last > v_cutoff;
        begin
            case v_slot
                when 0 then truncate flowfabric.event_0;
                when 1 then truncate flowfabric.event_1;
                when 2 then truncate flowfabric.event_2;
                when 3 then truncate flowfabric.event_3;
                when 4 then truncate flowfabric.event_4;
                when 5 then truncate flowfabric.event_5;
                when 6 then truncate flowfabric.event_6;
                when 7 then truncate flowfabric.event_7;
            end case;
            v_n := v_n + 1;
        exception when lock_not_available then
            null;   -- a long reader; the next round tries again
        end;
    end loop;
    return v_n;
end;
$$;
