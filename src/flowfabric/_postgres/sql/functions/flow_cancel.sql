-- Cancelling a whole flow: its header, the members that are owed a cancel, and what is done about them.

-- cancel_flow_header: close a flow, and note which members are owed a cancel
--
-- The targets that could be claimed are frozen here, those that come back later by make_ready: from now on none is claimed.
-- Locks    the flow, then its members that have not ended, by id.
-- Answers  one row: ok, already_terminal or flow_not_found; what is stored; all members; how many are targets.
create or replace function flowfabric.cancel_flow_header(
    p_partition integer, p_flow uuid, p_reason text, p_policy text, p_grace_ms bigint, p_requester text)
returns table (code text, policy text, reason text, members uuid[], targets integer)
language plpgsql security definer set search_path = flowfabric, pg_temp
set plan_cache_mode = force_generic_plan
set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_slot smallint;
    f flowfabric.flow;
    v_targets uuid[];
    v_frozen uuid[];
begin
    perform flowfabric.require_read_committed();
    select x.* into f from flowfabric.flow x where x.partition = p_partition and x.flow_id = p_flow for no key update;
    code := case when f.flow_id is null then 'flow_not_found' when f.state <> 'open' then 'already_terminal' else 'ok' end;
    policy := case when code = 'ok' then p_policy else f.cancellation_policy end;
    reason := case when code = 'ok' then p_reason else f.cancel_reason end;
    targets := 0;
    if code = 'ok' then
        perform 1 from (select x.partition, x.id from flowfabric.execution x where x.flow_id = p_flow and x.completed_at is null) m
        join flowfabric.execution e on e.partition = m.partition and e.id = m.id
        order by e.id for no key update of e;
        v_now := flowfabric.now();
        v_slot := flowfabric.open_log(v_now);
        select array_agg(e.id), array_agg(e.id) filter (where e.state not in ('active', 'suspended')) into v_targets, v_frozen
        from flowfabric.execution e
        where e.flow_id = p_flow and e.completed_at is null and p_policy <> 'flow_only'
          and (p_policy = 'cancel_all' or e.state not in ('active', 'suspended'));
        targets := coalesce(cardinality(v_targets), 0);
        update flowfabric.flow x
        set state = 'cancelled', cancelled_at = v_now, cancel_reason = p_reason, cancellation_policy = p_policy,
            last_mutation_at = v_now
        where x.partition = p_partition and x.flow_id = p_flow;
        if targets > 0 then
            insert into flowfabric.cancel_backlog
                (partition, flow_id, requested_at, requester, reason, cancellation_policy, grace_until)
            values (p_partition, p_flow, v_now, p_requester, p_reason, p_policy,
                    least(v_now + flowfabric.ms(p_grace_ms), flowfabric.far_date()));   -- what clients can read
            insert into flowfabric.cancel_member (partition, id, flow_id)
            select p_partition, u.id, p_flow from unnest(v_targets) u (id);
            -- Reclaimable by anybody until now.
            perform flowfabric.drop_ready(array_fill(p_partition, array[targets]), v_targets);
            if v_frozen is not null then
                perform flowfabric.freeze_members(array_fill(p_partition, array[cardinality(v_frozen)]), v_frozen, v_now);
            end if;
            perform flowfabric.wake_duties(v_now + flowfabric.ms(p_grace_ms));
        end if;
        insert into flowfabric.event (slot, occurred_at, partition, flow_id, namespace, tags, operator_type, reason, details)
        values (v_slot, v_now, p_partition, p_flow, f.namespace, nullif(f.tags, '{}'), 'flow_cancel_requested', p_reason,
                jsonb_build_object('flow_id', p_flow, 'cancellation_policy', p_policy, 'reason', p_reason,
                                   'member_count', targets));
        insert into flowfabric.flow_touched values (p_partition, p_flow);
    end if;
    select coalesce(array_agg(e.id order by e.created_at, e.id), '{}') into members
    from flowfabric.execution e where e.flow_id = p_flow;
    return next;
end;
$$;

-- freeze_members: runnable -> waiting, held back because the flow was cancelled. Called under the locks of the executions.
create or replace function flowfabric.freeze_members(p_partition integer[], p_id uuid[], p_now timestamptz) returns void
language plpgsql as $$
begin
    delete from flowfabric.blocked b
    using unnest(p_partition, p_id) as u (partition, id)
    join flowfabric.execution e on e.partition = u.partition and e.id = u.id
    where b.blocking_reason = e.blocking_reason and b.created_at = e.created_at and b.id = e.id and b.partition = e.partition;
    update flowfabric.execution e
    set state = 'waiting', blocking_reason = 'paused_by_flow_cancel', blocking_detail = 'flow cancelled', delay_until = null,
        held_back = null,
        transitioned_at = p_now, mutated_at = p_now
    from unnest(p_partition, p_id) as u (partition, id)
    where e.partition = u.partition and e.id = u.id
      and e.state in ('waiting', 'delayed', 'rate_limited', 'resumable', 'waiting_children');
    perform flowfabric.forget_waits(p_partition, p_id);
end;
$$;

-- cancel_members: cancel members of a cancelled flow that are owed it, and acknowledge those that have ended
--
-- One chunk. A chunk that fails as a whole is redone one by one; what fails alone stays owed.
-- Takes    p_after: go on behind this member.
-- Locks    the backlog of the flow, then the executions, by id; passes over what is in somebody's hands.
-- Answers  how many were acknowledged, which could not be, how many are left, the last member looked at; busy: another
--          call is at it.
create or replace function flowfabric.cancel_members(
    p_partition integer, p_flow uuid, p_limit integer, p_after uuid)
returns table (handled integer, failed uuid[], message text, remaining integer, last uuid, busy boolean)
language plpgsql security definer set search_path = flowfabric, pg_temp
set plan_cache_mode = force_generic_plan
set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    b flowfabric.cancel_backlog;
    v_owed uuid[]; v_held uuid[];
begin
    perform flowfabric.require_read_committed();
    handled := 0; failed := '{}'; busy := false;
    select x.* into b from flowfabric.cancel_backlog x where x.partition = p_partition and x.flow_id = p_flow
    for update skip locked;
    busy := b.flow_id is null and exists (
        select from flowfabric.cancel_backlog x where x.partition = p_partition and x.flow_id = p_flow);
    if b.flow_id is null then
        select count(*) into remaining from flowfabric.cancel_member m where m.partition = p_partition and m.flow_id = p_flow;
        return next;
        return;
    end if;
    select array_agg(m.id), max(m.id::text)::uuid into v_owed, last
    from (select x.id from flowfabric.cancel_member x where x.partition = p_partition and x.flow_id = p_flow
            and x.id > coalesce(p_after, '00000000-0000-0000-0000-000000000000'::uuid)
          order by x.id limit p_limit) m;
    with held as materialized (   -- in the order of the ids
        select e.id from unnest(v_owed) u (id)
        cross join lateral (select x.id from flowfabric.execution x where x.partition = p_partition and x.id = u.id
                            offset 0 for no key update skip locked) e)
    select array_agg(h.id) into v_held from held h;
    v_now := flowfabric.now();
    begin
        perform flowfabric.end_members(p_partition, v_held, b.reason, v_now);
    exception
    when serialization_failure or deadlock_detected then
        raise;
    when others then
        for i in 1 .. cardinality(v_held) loop
            begin
                perform flowfabric.end_members(p_partition, v_held[i:i], b.reason, v_now);
            exception when others then
                failed := failed || v_held[i];
                message := sqlerrm;
            end;
        end loop;
    end;
    delete from flowfabric.cancel_member m using (
        select x.tid from unnest(v_owed) u (id)
        cross join lateral (
            select y.ctid as tid from flowfabric.cancel_member y where y.partition = p_partition and y.id = u.id
              and not exists (select from flowfabric.execution e
                              where e.partition = p_partition and e.id = u.id and e.completed_at is null) offset 0) x) done
    where m.ctid = done.tid;
    get diagnostics handled = row_count;
    select count(*) into remaining from (
        select from flowfabric.cancel_member m where m.partition = p_partition and m.flow_id = p_flow limit 10000) m;
    if remaining = 0 then
        delete from flowfabric.cancel_backlog x where x.partition = p_partition and x.flow_id = p_flow;
    end if;
    return next;
end;
$$;

-- end_members: cancel those of these executions that have not ended. Called under their locks.
create or replace function flowfabric.end_members(p_partition integer, p_id uuid[], p_reason text, p_now timestamptz)
returns void
language plpgsql as $$
begin
    perform flowfabric.end_executions(
        array_agg(e.partition), array_agg(e.id), null, 'cancelled', 'ended_cancelled', 'cancelled', null, null, null, null,
        coalesce(nullif(p_reason, ''), 'flow_cancelled'), 'operator_override', 'cancelled', 'operator', false, p_now)
    from unnest(p_id) u (id)
    cross join lateral (select x.partition, x.id from flowfabric.execution x
                        where x.partition = p_partition and x.id = u.id and x.completed_at is null offset 0) e
    having count(*) > 0;
end;
$$;

-- ack_cancel_member: a member owes nothing any more; the last one takes the backlog with it.
create or replace function flowfabric.ack_cancel_member(p_partition integer, p_flow uuid, p_id uuid) returns void
language plpgsql security definer set search_path = flowfabric, pg_temp as $$
begin
    perform 1 from flowfabric.cancel_backlog b where b.partition = p_partition and b.flow_id = p_flow for update;
    delete from flowfabric.cancel_member m where m.partition = p_partition and m.id = p_id and m.flow_id = p_flow;
    delete from flowfabric.cancel_backlog b
    where b.partition = p_partition and b.flow_id = p_flow and not exists (
        select from flowfabric.cancel_member m where m.partition = p_partition and m.flow_id = p_flow);
end;
$$;

-- due_cancellations: cancelled flows whose grace is over and that still owe something, oldest first.
create or replace function flowfabric.due_cancellations(p_limit integer)
returns table (partition integer, flow_id uuid)
language sql volatile security definer set search_path = flowfabric, pg_temp as $$
    select b.partition, b.flow_id from flowfabric.cancel_backlog b
    where b.grace_until <= flowfabric.now() order by b.grace_until limit p_limit
$$;

-- read_cancel_backlog: what a cancelled flow still owes.
create or replace function flowfabric.read_cancel_backlog(p_partition integer, p_flow uuid)
returns table (requested_at timestamptz, requester text, reason text, cancellation_policy text, grace_until timestamptz,
               owed uuid[])
language sql stable security definer set search_path = flowfabric, pg_temp as $$
    select b.requested_at, b.requester, b.reason, b.cancellation_policy, b.grace_until,
           (select coalesce(array_agg(m.id order by m.id), '{}') from flowfabric.cancel_member m
            where m.partition = b.partition and m.flow_id = b.flow_id)
    from flowfabric.cancel_backlog b where b.partition = p_partition and b.flow_id = p_flow
$$;
