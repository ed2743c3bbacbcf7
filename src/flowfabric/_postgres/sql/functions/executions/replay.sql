-- replay: terminal -> waiting for a new attempt, or for dependencies again, for many in one call
--
-- Called by operators.
-- Locks    what is left of cancelling their children, then the groups of members of flows, then the executions and the upstreams of those groups, by partition and id;
--          the backlogs of their flows, if one is marked to be cancelled.
-- Returns  one verdict per item: ok, not_found, execution_not_terminal, execution_redacted or max_replays_exhausted.
-- Roles    operate
create or replace function flowfabric.replay(
    p_partition integer[], p_id uuid[], p_reason text, p_requested_by text)
returns setof flowfabric.verdict
language plpgsql security definer as $$
declare
    v_now timestamptz;
    v_slot smallint;
    v_code text[];
    v_partitions integer[]; v_ids uuid[];
    v_gated_partitions integer[]; v_gated_ids uuid[];    -- have a group that is not satisfied, or is all_settled
    v_before integer;
begin
    perform flowfabric.require_read_committed();
    perform 1 from (select u.* from unnest(p_partition, p_id) as u (partition, id) order by u.partition, u.id) o
    cross join lateral (select from flowfabric.child_cancel x where x.partition = o.partition and x.id = o.id
                        offset 0 for update) c;
    with held as materialized (
        select g.downstream from unnest(p_partition, p_id) as u (partition, id)
        join flowfabric.execution e on e.partition = u.partition and e.id = u.id
        join flowfabric.edge_group g on g.partition = e.partition and g.flow_id = e.flow_id and g.downstream = e.id
        where g.n > 0
        order by g.partition, g.downstream for update of g
    )
    select count(distinct h.downstream) into v_before from held h;
    if v_before = 0 then
        perform 1 from unnest(p_partition, p_id) as u (partition, id)
        join flowfabric.execution e on e.partition = u.partition and e.id = u.id
        order by e.partition, e.id for no key update of e;
    else
        perform 1 from (
            select u.partition, u.id from unnest(p_partition, p_id) as u (partition, id)
            union
            select d.partition, d.upstream from unnest(p_partition, p_id) as u (partition, id)
            join flowfabric.edge d on d.partition = u.partition and d.downstream = u.id and d.applied_at is not null) n
        join flowfabric.execution e on e.partition = n.partition and e.id = n.id
        order by e.partition, e.id for no key update of e;
    end if;
    if v_before <> (select count(distinct g.downstream) from unnest(p_partition, p_id) as u (partition, id)
                    join flowfabric.execution e on e.partition = u.partition and e.id = u.id
                    join flowfabric.edge_group g on g.partition = e.partition and g.flow_id = e.flow_id and g.downstream = e.id
                    where g.n > 0) then
        raise exception 'an edge was applied meanwhile' using errcode = 'serialization_failure';
    end if;
    v_now := flowfabric.now();
    v_slot := flowfabric.open_log(v_now);
    select array_agg(case
               when e.id is null then 'not_found'
               when e.completed_at is null or u.nth > 1 then 'execution_not_terminal'
               when e.payload_encoding = 'redacted' and e.payload = '' then 'execution_redacted'
               when e.replays >= coalesce((e.policy ->> 'max_replay_count')::bigint, 10) then 'max_replays_exhausted'
               else 'ok' end order by u.ord)
    into v_code
    from (select i.*, row_number() over (partition by i.partition, i.id order by i.ord) as nth
          from unnest(p_partition, p_id) with ordinality as i (partition, id, ord)) u
    left join flowfabric.execution e on e.partition = u.partition and e.id = u.id;
    select array_agg(u.partition), array_agg(u.id) into v_partitions, v_ids
    from unnest(p_partition, p_id, v_code) as u (partition, id, code) where u.code = 'ok';
    if v_ids is not null then
        delete from flowfabric.unsuccessful w
        using unnest(v_partitions, v_ids) as u (partition, id)
        join flowfabric.execution e on e.partition = u.partition and e.id = u.id
        where w.state = e.state and w.created_at = e.created_at and w.id = e.id and w.partition = e.partition;
        perform flowfabric.forget_signals(v_partitions, v_ids);
        perform flowfabric.renew_children(v_partitions, v_ids);
        -- An execution that ended while marked to be cancelled loses the mark; its next run was not cancelled.
        perform flowfabric.ack_cancel_member(c.partition, c.flow_id, c.id)
        from (select m.* from unnest(v_partitions, v_ids) as u (partition, id)
              cross join lateral (select x.* from flowfabric.cancel_member x
                                  where x.partition = u.partition and x.id = u.id offset 0) m
              order by m.partition, m.flow_id, m.id) c;
        if v_before > 0 then
            select array_agg(e.partition), array_agg(e.id) into v_gated_partitions, v_gated_ids
            from unnest(v_partitions, v_ids) as u (partition, id)
            join flowfabric.execution e on e.partition = u.partition and e.id = u.id
            join flowfabric.edge_group g on g.partition = e.partition and g.flow_id = e.flow_id and g.downstream = e.id
            where g.n > 0 and (g.state <> 'satisfied' or g.policy = 'all_settled');
        end if;
        -- A new run receives the newest results.
        update flowfabric.edge d set is_kept = false, kept_result = null, kept_encoding = null
        from unnest(v_partitions, v_ids) as u (partition, id), flowfabric.execution up
        where d.partition = u.partition and d.downstream = u.id and d.is_kept
          and up.partition = d.partition and up.id = d.upstream and up.state = 'completed';
        -- Executions that already received its result keep that result.
        update flowfabric.edge d set is_kept = true, kept_result = e.result, kept_encoding = e.result_encoding
        from unnest(v_partitions, v_ids) as u (partition, id)
        join flowfabric.execution e on e.partition = u.partition and e.id = u.id and e.state = 'completed'
             and e.flow_id is not null
        where d.partition = e.partition and d.upstream = e.id and d.passes and d.outcome = 'success';
        -- So do those that received its failure.
        update flowfabric.edge d set is_kept = true, kept_encoding = e.failure_category,
               kept_result = flowfabric.reason_bytes(e.failure_reason, e.cancellation_reason)
        from unnest(v_partitions, v_ids) as u (partition, id)
        join flowfabric.execution e on e.partition = u.partition and e.id = u.id and e.state <> 'completed'
             and e.flow_id is not null, flowfabric.edge_group g
        where d.partition = e.partition and d.upstream = e.id and d.passes and d.outcome <> 'success' and not d.is_kept
          and g.partition = d.partition and g.flow_id = d.flow_id and g.downstream = d.downstream and g.policy = 'all_settled';
        with replayed as (
            update flowfabric.execution e
            set state = 'waiting', blocking_reason = 'waiting_for_worker', blocking_detail = null, pending = 'replay',
                replays = e.replays + 1, completed_at = null, attempt_ended_at = coalesce(e.attempt_ended_at, e.completed_at),
                generation = e.generation + case when e.state = 'completed' then 1 else 0 end,
                pinned = case when e.state <> 'completed' then e.pinned end, stop_epoch = null, result = null, result_encoding = null,
                failure_reason = null, failure_category = null, cancellation_reason = null, cancelled_by = null,
                progress_pct = null, progress_message = null, progress_updated_at = null, deadline_at = null, keeps_children = null,
                pending_replay_reason = p_reason, pending_replay_requested_by = p_requested_by,
                transitioned_at = v_now, mutated_at = null
            from unnest(v_partitions, v_ids) as u (partition, id)
            where e.partition = u.partition and e.id = u.id
            returning e.*
        )
        insert into flowfabric.event
            (slot, route, occurred_at, partition, id, flow_id, namespace, tags, operator_type, attempt_id, attempt_index,
             reason, details)
        select v_slot, r.route, v_now, r.partition, r.id, r.flow_id, r.namespace, r.tags, 'replayed', r.attempt_id,
               r.attempt_index, p_reason,
               case when r.id = any (v_gated_ids) then '{"branch": "skipped_flow_member", "groups_reset": 1}'::jsonb
                    else '{"branch": "normal"}'::jsonb end
        from replayed r;
        if v_gated_ids is not null then
            perform flowfabric.reset_groups(v_gated_partitions, v_gated_ids, v_now);
        end if;
        -- Executions with open dependencies are held back there.
        perform flowfabric.make_ready(v_partitions, v_ids, null);
        if v_gated_ids is not null then
            update flowfabric.execution e
            set blocking_detail = g.n - g.succeeded - g.failed - g.skipped || ' dep(s) unsatisfied after replay'
            from unnest(v_gated_partitions, v_gated_ids) as u (partition, id), flowfabric.edge_group g
            where e.partition = u.partition and e.id = u.id and e.state = 'waiting_children'
              and g.partition = e.partition and g.flow_id = e.flow_id and g.downstream = e.id;
        end if;
    end if;
    return query
    select u.ord::integer, u.code, null::text, case when u.code = 'ok' then e.state end, null::bigint, null::uuid, v_now
    from unnest(p_partition, p_id, v_code) with ordinality as u (partition, id, code, ord)
    left join flowfabric.execution e on e.partition = u.partition and e.id = u.id;
end;
$$;
