-- end_executions: anything -> terminal, for many in one call. Every execution ends here.
--
-- Called by complete, fail, cancel, the timeouts and the reclaim cap, under the locks they took.
-- Takes    p_tids: the tids of the rows if every item is known to be active and leased, so that there is no ready row,
--          grant, block or wait to remove; null otherwise.
--          p_lease_event: emit the lease part of the event even if the lease was lost before.
-- Writes   one event per execution: its completion and, if it held a lease, the end of that lease.
create or replace function flowfabric.end_executions(
    p_partition integer[], p_id uuid[], p_tids tid[], p_state text, p_disposition text,
    p_result bytea[], p_result_encoding text[], p_failure_reason text[], p_failure_category text[],
    p_cancel_reason text, p_cancelled_by text, p_lease_reason text, p_revoked_by text, p_lease_event boolean,
    p_now timestamptz)
returns void
language plpgsql as $$
declare
    v_leased boolean[];
    v_tids tid[] := p_tids;
    v_slot smallint := flowfabric.open_log(p_now);
    v_had_waitpoints boolean; v_had_hooks boolean; v_had_limits boolean; v_had_reserved boolean;
    v_had_retention boolean; v_awaited boolean; v_watched boolean;
    v_one record;
    v_partitions integer[]; v_ids uuid[]; v_flows uuid[]; v_runs integer[]; v_events bigint[];   -- members of flows
begin
    if p_tids is null then
        if p_lease_reason is distinct from 'completed' then
            perform flowfabric.tell_holders(p_partition, p_id);
        end if;
        select array_agg(p_lease_event or (e.state = 'active' and e.lease_lost is null) order by u.ord),
               array_agg(e.ctid order by u.ord)
        into v_leased, v_tids
        from unnest(p_partition, p_id) with ordinality as u (partition, id, ord)
        join flowfabric.execution e on e.partition = u.partition and e.id = u.id;
        perform flowfabric.drop_ready(p_partition, p_id);
        perform flowfabric.forget_waits(p_partition, p_id);
        perform flowfabric.drop_blocked(p_partition, p_id);
    end if;

    if p_state = 'completed' and cardinality(p_tids) = 1 then
        -- The most common call, in statements about one row: they start faster than the one for many.
        update flowfabric.execution e
        set state = p_state, disposition = p_disposition, attempt_failure_reason = null, attempt_failure_category = null,
            blocking_reason = null, blocking_detail = null, pending = null, resume_pending = false, lease_lost = null,
            delay_until = null, attempt_timeout_at = null, attempt_timeout_left = null, suspension_timeout_at = null,
            held_back = null, is_parked = false, stop_route = null,
            result = p_result[1], result_encoding = p_result_encoding[1], failure_reason = null, failure_category = null,
            cancellation_reason = p_cancel_reason, cancelled_by = p_cancelled_by,
            completed_at = p_now, transitioned_at = p_now, mutated_at = null
        where e.ctid = p_tids[1]
        returning e.partition, e.id, e.flow_id, e.parent_id, e.namespace, e.tags, e.attempt_id, e.attempt_index, e.lease_id, e.epoch,
                  e.worker, e.route, e.policy, e.has_waitpoints, e.has_reserved, e.replays, e.limits
        into v_one;
        insert into flowfabric.event
            (slot, route, occurred_at, partition, id, flow_id, parent_id, namespace, tags, outcome, lease_type, lease_id, lease_epoch,
             attempt_id, attempt_index, worker, reason, revoked_by)
        values (v_slot, v_one.route, p_now, v_one.partition, v_one.id, v_one.flow_id, v_one.parent_id, v_one.namespace, v_one.tags,
                'success', 'revoked', v_one.lease_id, v_one.epoch, v_one.attempt_id, v_one.attempt_index, v_one.worker,
                p_lease_reason, p_revoked_by)
        returning array[seq] into v_events;
        select v_one.limits is not null, v_one.has_waitpoints, v_one.has_reserved, v_one.policy -> 'stream_policy' is not null,
               exists (select from flowfabric.waiter w where w.awaited_partition = v_one.partition and w.awaited_id = v_one.id),
               exists (select from flowfabric.watch w where w.partition = v_one.partition and w.id = v_one.id)
        into v_had_limits, v_had_waitpoints, v_had_reserved, v_had_retention, v_awaited, v_watched;
        if v_one.flow_id is not null then
            v_partitions := p_partition; v_ids := p_id; v_flows := array[v_one.flow_id]; v_runs := array[v_one.replays];
        end if;
    else
        with ended as (
            update flowfabric.execution e
            set state = p_state,
                disposition = case when e.state = 'active' or e.pending = 'interrupted' then p_disposition else e.disposition end,
                attempt_failure_reason = case when e.state = 'active' or e.pending = 'interrupted'
                    then coalesce(u.failure_reason, 'cancelled: ' || p_cancel_reason,
                                  case p_state when 'skipped' then 'dependency_impossible' end) else e.attempt_failure_reason end,
                attempt_failure_category = case when e.state = 'active' or e.pending = 'interrupted' then u.failure_category else e.attempt_failure_category end,
                blocking_reason = null, blocking_detail = null, pending = null, resume_pending = false, lease_lost = null,
                delay_until = null, attempt_timeout_at = null, attempt_timeout_left = null, suspension_timeout_at = null,
                held_back = null, is_parked = false, stop_route = null,
                result = u.result, result_encoding = u.result_encoding,
                -- An earlier attempt may have failed.
                failure_reason = case p_state when 'completed' then null else coalesce(u.failure_reason, e.failure_reason) end,
                failure_category = case p_state when 'completed' then null else coalesce(u.failure_category, e.failure_category) end,
                cancellation_reason = p_cancel_reason, cancelled_by = p_cancelled_by,
                completed_at = p_now, transitioned_at = p_now, mutated_at = null
            from unnest(v_tids, p_result, p_result_encoding, p_failure_reason, p_failure_category, v_leased)
                 as u (tid, result, result_encoding, failure_reason, failure_category, leased)
            where e.ctid = u.tid
            returning e.partition, e.id, e.flow_id, e.parent_id, e.namespace, e.tags, e.attempt_id, e.attempt_index, e.lease_id, e.epoch,
                      e.worker, e.route, e.created_at, e.policy, coalesce(u.leased, true) as leased,
                      e.has_waitpoints, e.has_reserved, e.replays, e.limits
        ), logged as (
            insert into flowfabric.event
                (slot, route, occurred_at, partition, id, flow_id, parent_id, namespace, tags, outcome, lease_type, lease_id, lease_epoch,
                 attempt_id, attempt_index, worker, reason, revoked_by)
            select v_slot, e.route, p_now, e.partition, e.id, e.flow_id, e.parent_id, e.namespace, e.tags,
                   case when p_state = 'completed' then 'success' else p_state end,
                   case when e.leased then 'revoked' end, case when e.leased then e.lease_id end,
                   case when e.leased then e.epoch end, e.attempt_id, e.attempt_index,
                   case when e.leased then e.worker end,
                   case when e.leased then p_lease_reason end, case when e.leased then p_revoked_by end
            from ended e
            returning seq, flow_id
        ), listed as (
            insert into flowfabric.unsuccessful (state, created_at, ended_at, id, partition)
            select p_state, e.created_at, p_now, e.id, e.partition from ended e where p_state <> 'completed'
        )
        -- Waiters and watches by id: the tables may be full of other rows, dead or alive. The fence (offset 0) keeps a plan that
        -- was made while they were empty from scanning them later.
        select bool_or(e.limits is not null), bool_or(e.has_waitpoints), bool_or(p_state in ('failed', 'expired') and e.policy -> 'hooks' is not null),
               bool_or(e.has_reserved), bool_or(e.policy -> 'stream_policy' is not null),
               bool_or(exists (select from flowfabric.waiter w
                               where w.awaited_partition = e.partition and w.awaited_id = e.id offset 0)),
               bool_or(exists (select from flowfabric.watch w where w.partition = e.partition and w.id = e.id offset 0)),
               array_agg(e.partition) filter (where e.flow_id is not null),
               array_agg(e.id) filter (where e.flow_id is not null), array_agg(e.flow_id) filter (where e.flow_id is not null),
               array_agg(e.replays) filter (where e.flow_id is not null),
               (select array_agg(l.seq) from logged l where l.flow_id is not null)   -- in the same order
        into v_had_limits, v_had_waitpoints, v_had_hooks, v_had_reserved, v_had_retention, v_awaited, v_watched,
             v_partitions, v_ids, v_flows, v_runs, v_events
        from ended e;
    end if;
    if v_had_retention then
        insert into flowfabric.timer (kind, due_at, partitions, ids)
        select 'retention', r.due, array_agg(r.partition), array_agg(r.id)
        from (select e.partition, e.id, p_now + flowfabric.retention_of(p_state, e.policy, d) as due
              from unnest(p_partition, p_id) as u (partition, id)
              join flowfabric.execution e on e.partition = u.partition and e.id = u.id
              cross join flowfabric.deployment d) r
        group by r.due;
    else   -- nearly always: one time for all
        insert into flowfabric.timer (kind, due_at, partitions, ids)
        select 'retention', p_now + flowfabric.retention_of(p_state, null, d), p_partition, p_id from flowfabric.deployment d;
    end if;
    if v_had_limits then
        perform flowfabric.give_slots(p_partition, p_id, false, p_now);
    end if;
    if v_had_waitpoints then
        perform flowfabric.end_waits(
            array_agg(u.partition), array_agg(u.id),
            array_agg(case p_state when 'expired' then 'expired:' || u.reason else p_state end), p_now)
        from unnest(p_partition, p_id, p_failure_reason) as u (partition, id, reason);
    end if;
    if v_had_reserved then   -- without tids its holder does not end it: held amounts may have been used
        perform flowfabric.end_reservations(p_partition, p_id, p_tids is null, p_now);
    end if;
    if v_had_hooks then
        perform flowfabric.leave_hooks(p_partition, p_id, 'failure', '{}', p_now);
    end if;
    if p_state in ('cancelled', 'expired') then
        perform flowfabric.enqueue_children(p_partition, p_id, p_now);
    end if;
    if v_flows is not null then
        perform flowfabric.cascade_ended(v_partitions, v_ids, v_flows, v_runs, v_events, p_state, p_now);
    end if;
    if v_awaited then
        perform flowfabric.wake_parents(p_partition, p_id, p_now);
    end if;
    if v_watched then
        perform flowfabric.tell_watchers(p_partition, p_id, null);
    end if;
end;
$$;
