-- replay: terminal -> waiting for a new attempt, for many at once
--
-- Called by operators.
-- Locks    the executions, by partition and id.
-- Answers  one verdict per item: ok, not_found, execution_not_terminal or max_replays_exhausted.
create or replace function flowfabric.replay(
    p_partition integer[], p_id uuid[], p_reason text, p_requested_by text)
returns setof flowfabric.verdict
language plpgsql security definer set search_path = flowfabric, pg_temp
set plan_cache_mode = force_generic_plan
set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set jit = off as $$
declare
    v_now timestamptz;
    v_slot smallint;
    v_code text[];
    v_partitions integer[]; v_ids uuid[];
begin
    perform 1 from unnest(p_partition, p_id) as u (partition, id)
    join flowfabric.execution e on e.partition = u.partition and e.id = u.id
    order by e.partition, e.id for no key update of e;
    v_now := flowfabric.now();
    v_slot := flowfabric.open_log(v_now);
    select array_agg(case
               when e.id is null then 'not_found'
               when e.completed_at is null or u.nth > 1 then 'execution_not_terminal'
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
        with replayed as (
            update flowfabric.execution e
            set state = 'waiting', blocking_reason = 'waiting_for_worker', blocking_detail = null, pending = 'replay',
                replays = e.replays + 1, completed_at = null,
                generation = e.generation + case when e.state = 'completed' then 1 else 0 end, result = null, result_encoding = null,
                failure_reason = null, failure_category = null, cancellation_reason = null, cancelled_by = null,
                progress_pct = null, progress_message = null, progress_updated_at = null, deadline_at = null,
                pending_replay_reason = p_reason, pending_replay_requested_by = p_requested_by,
                transitioned_at = v_now, mutated_at = v_now
            from unnest(v_partitions, v_ids) as u (partition, id)
            where e.partition = u.partition and e.id = u.id
            returning e.*
        )
        insert into flowfabric.event
            (slot, occurred_at, partition, id, flow_id, namespace, tags, operator_type, attempt_id, attempt_index,
             reason, details)
        select v_slot, v_now, r.partition, r.id, r.flow_id, r.namespace, r.tags, 'replayed', r.attempt_id,
               r.attempt_index, p_reason, '{"branch": "normal"}'::jsonb
        from replayed r;
        perform flowfabric.make_ready(v_partitions, v_ids, null);
    end if;
    return query
    select u.ord::integer, u.code, null::text, case when u.code = 'ok' then 'waiting' end, null::bigint, null::uuid, v_now
    from unnest(v_code) with ordinality as u (code, ord);
end;
$$;
