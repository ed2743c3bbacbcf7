-- start_attempts: waiting, resumable or active with a lost lease -> active under a new lease
--
-- Called by every kind of claim, under its locks; the ready rows are already deleted. A pending attempt is created, an
-- interrupted one continues, a lost lease is replaced by a new attempt.
-- Takes    p_tids: the positions of the locked rows. p_worker: its number. p_lease, p_attempt: ids that the caller minted; a
--          null array lets the database mint them. p_again: some of the executions are not at their first attempt.
--          p_from, p_to: routes, and the route of the version in which their executions begin; null: without versions.
-- Returns  one row per lease, in the order of p_tids.
create or replace function flowfabric.start_attempts(
    p_tids tid[], p_lease uuid[], p_attempt uuid[], p_worker integer, p_ttl_ms bigint, p_timeout_ms bigint,
    p_deadline_at timestamptz, p_policy jsonb, p_reason text, p_again boolean, p_from integer[], p_to integer[],
    p_now timestamptz)
returns setof flowfabric.claimed
language plpgsql as $$
#variable_conflict use_column
declare
    v_slot smallint := flowfabric.open_log(p_now);
    v_expires timestamptz := p_now + flowfabric.ms(p_ttl_ms);
    -- The ids of the call are the first 23 digits of a seed, marked as of version 4, and a number. (gen_random_uuid opens a
    -- device.) The id of a lease is the right to report, and must not follow from the id of its attempt, which refusals tell.
    v_lease_seed text := flowfabric.uuid_seed(clock_timestamp() || ' ' || random() || ' ' || random());
    v_seed text := flowfabric.uuid_seed(v_lease_seed);
begin
    if not p_again and p_deadline_at is null then
        -- The common case has its own statement: the general one makes a claim 5 % slower.
        return query
        with started as (
            update flowfabric.execution e
            set state = 'active', blocking_reason = null, blocking_detail = null, pending = null, delay_until = null,
                epoch = e.epoch + 1, lease_id = coalesce(p_lease[u.ord], (v_lease_seed || (100000000 + u.ord))::uuid),
                worker = p_worker, lease_expires_at = v_expires,
                attempts = 1, attempt_index = 0,
                attempt_id = coalesce(p_attempt[u.ord], (v_seed || (100000000 + u.ord))::uuid),
                attempt_started_at = p_now,
                attempt_policy = p_policy, pinned = p_to[array_position(p_from, e.route)],
                attempt_timeout_at = p_now + flowfabric.ms(coalesce(
                    p_timeout_ms, nullif((e.policy -> 'timeout_policy' ->> 'attempt_timeout_ms')::bigint, 0))),
                transitioned_at = p_now, mutated_at = null
            from unnest(p_tids) with ordinality as u (tid, ord)
            where e.ctid = u.tid
            returning e.partition, e.id, e.route, e.attempt_id, e.lease_id, e.epoch, e.namespace, e.flow_id, e.priority,
                      e.created_at, e.payload, e.payload_encoding, e.tags, e.deadline_at, e.attempt_timeout_at,
                      e.retries, e.reclaims, e.replays, e.has_inputs, flowfabric.durability_of(e.policy) as durability,
                      e.forked_from is not null as has_steps
        ), logged as (
            insert into flowfabric.event
                (slot, route, occurred_at, partition, id, flow_id, namespace, tags, lease_type, lease_id, lease_epoch,
                 attempt_id, attempt_index, worker, reason)
            select v_slot, s.route, p_now, s.partition, s.id, s.flow_id, s.namespace, s.tags, 'acquired', s.lease_id, s.epoch,
                   s.attempt_id, 0, p_worker, p_reason
            from started s
        ), watched as (
            insert into flowfabric.timer (kind, due_at, partitions, ids)
            select 'lease', v_expires, array_agg(s.partition), array_agg(s.id) from started s having count(*) > 0
            union all
            select 'attempt', s.attempt_timeout_at, array_agg(s.partition), array_agg(s.id)
            from started s where s.attempt_timeout_at is not null group by s.attempt_timeout_at
        ), touched as (
            insert into flowfabric.flow_touched
            select distinct s.partition, s.flow_id from started s where s.flow_id is not null
        )
        select s.partition, s.id, 'fresh', 0, s.attempt_id, 'initial', s.lease_id, s.epoch, v_expires, r.lane, r.kind,
               s.namespace, s.flow_id, s.priority, s.created_at, coalesce((s.i).payload, s.payload),
               case when (s.i).payload is null then s.payload_encoding else (s.i).encoding end, s.tags, s.deadline_at,
               s.attempt_timeout_at, s.retries, s.reclaims, s.replays, (s.i).upstreams, (s.i).states, (s.i).results,
               (s.i).encodings, s.durability, s.has_steps
        from (select x.*, case when x.has_inputs then flowfabric.inputs_of(x.partition, x.id) end as i
              from started x offset 0) s
        join flowfabric.route r on r.id = s.route;   -- in the order of the positions given
    else
        return query select * from flowfabric.start_later_attempts(
            p_tids, p_lease, p_attempt, p_worker, p_timeout_ms, p_deadline_at, p_policy, p_reason,
            p_again, p_from, p_to, v_slot, v_seed, v_lease_seed, v_expires, p_now);
    end if;
end;
$$;

-- start_later_attempts: start_attempts for executions at any attempt, or with a new deadline.
create or replace function flowfabric.start_later_attempts(
    p_tids tid[], p_lease uuid[], p_attempt uuid[], p_worker integer, p_timeout_ms bigint,
    p_deadline_at timestamptz, p_policy jsonb, p_reason text, p_again boolean, p_from integer[], p_to integer[],
    p_slot smallint, p_seed text, p_lease_seed text, p_expires timestamptz, p_now timestamptz)
returns setof flowfabric.claimed
language plpgsql as $$
#variable_conflict use_column
begin
    if p_again then
        perform flowfabric.keep_attempts(p_tids, p_now);
        perform flowfabric.move_waitpoints(p_tids, p_now);
    end if;
    if p_deadline_at is not null then
        insert into flowfabric.timer (kind, due_at, partitions, ids)
        select 'deadline', greatest(p_deadline_at, p_now), array_agg(e.partition), array_agg(e.id)
        from unnest(p_tids) as u (tid) join flowfabric.execution e on e.ctid = u.tid having count(*) > 0;
    end if;

    return query
    with started as (
        update flowfabric.execution e
        set state = 'active', blocking_reason = null, blocking_detail = null, pending = null, resume_pending = false,
            lease_lost = null, lease_lost_at = null, lease_revoke_reason = null, delay_until = null, stop_route = null,
            -- Fixed by the first attempt, and by the first after a replay of a success.
            pinned = case when e.attempts = 0 or (e.pending = 'replay' and e.disposition = 'completed')
                          then p_to[array_position(p_from, e.route)] else e.pinned end,
            epoch = e.epoch + 1, lease_id = coalesce(p_lease[u.ord], (p_lease_seed || (100000000 + u.ord))::uuid),
            worker = p_worker, lease_renewed_at = null, lease_expires_at = p_expires,
            started_at = coalesce(e.started_at, e.attempt_started_at),
            deadline_at = coalesce(p_deadline_at, e.deadline_at),
            attempt_suspended_at = null, attempt_ended_at = null,
            attempt_failure_reason = null, attempt_failure_category = null, disposition = null, retry_at = null,
            reclaims = case when e.lease_lost is null then e.reclaims else e.reclaims + 1 end,
            reclaim_reason = null, pending_replay_reason = null, pending_replay_requested_by = null,
            -- the same attempt, or a new one
            attempt_resumed_at = case when flowfabric.continues(e.pending, e.lease_lost) then p_now end,
            attempt_index = case when flowfabric.continues(e.pending, e.lease_lost) then e.attempt_index else e.attempts end,
            attempts = case when flowfabric.continues(e.pending, e.lease_lost) then e.attempts else e.attempts + 1 end,
            attempt_id = case when flowfabric.continues(e.pending, e.lease_lost) then e.attempt_id
                              else coalesce(p_attempt[u.ord], (p_seed || (100000000 + u.ord))::uuid) end,
            attempt_type = case when e.lease_lost is not null then 'reclaim' when e.pending = 'interrupted'
                                then e.attempt_type else nullif(e.pending, 'first') end,
            attempt_started_at = case when flowfabric.continues(e.pending, e.lease_lost) then e.attempt_started_at else p_now end,
            attempt_policy = case when flowfabric.continues(e.pending, e.lease_lost) then e.attempt_policy else p_policy end,
            previous_attempt_index = case when flowfabric.continues(e.pending, e.lease_lost)
                                          then e.previous_attempt_index else e.attempt_index end,
            retry_reason = case when e.pending = 'retry' then e.attempt_failure_reason
                                when flowfabric.continues(e.pending, e.lease_lost) then e.retry_reason end,
            replay_reason = case when e.pending = 'replay' then e.pending_replay_reason
                                 when flowfabric.continues(e.pending, e.lease_lost) then e.replay_reason end,
            replay_requested_by = case when e.pending = 'replay' then e.pending_replay_requested_by
                when flowfabric.continues(e.pending, e.lease_lost) then e.replay_requested_by end,
            replayed_from_attempt_index = case when e.pending = 'replay' then e.attempt_index
                when flowfabric.continues(e.pending, e.lease_lost) then e.replayed_from_attempt_index end,
            attempt_timeout_left = null,
            attempt_timeout_at = p_now + coalesce(
                flowfabric.ms(p_timeout_ms),
                case when flowfabric.continues(e.pending, e.lease_lost) then e.attempt_timeout_left
                     else flowfabric.ms(nullif((e.policy -> 'timeout_policy' ->> 'attempt_timeout_ms')::bigint, 0)) end),
            transitioned_at = p_now, mutated_at = null
        from unnest(p_tids) with ordinality as u (tid, ord)
        where e.ctid = u.tid
        returning e.partition, e.id, e.route, e.attempt_index, e.attempt_id, e.attempt_type, e.attempt_resumed_at,
                  e.lease_id, e.epoch, e.namespace, e.flow_id, e.priority, e.created_at, e.payload, e.payload_encoding,
                  e.tags, e.deadline_at, e.attempt_timeout_at, e.retries, e.reclaims, e.replays, e.has_inputs,
                  flowfabric.durability_of(e.policy) as durability, e.forked_from is not null as has_steps,
                  case when e.attempt_resumed_at is not null then 'resumed'
                       when e.attempt_type = 'reclaim' then 'reclaimed' else 'fresh' end as handle_kind
    ), logged as (
        insert into flowfabric.event
            (slot, route, occurred_at, partition, id, flow_id, namespace, tags, lease_type, lease_id, lease_epoch, attempt_id,
             attempt_index, worker, reason, details)
        select p_slot, s.route, p_now, s.partition, s.id, s.flow_id, s.namespace, s.tags,
               case s.handle_kind when 'reclaimed' then 'reclaimed' else 'acquired' end,
               s.lease_id, case s.handle_kind when 'reclaimed' then s.epoch - 1 else s.epoch end, s.attempt_id,
               s.attempt_index, p_worker,
               case s.handle_kind when 'resumed' then 'claim_resumed' else p_reason end,
               case s.handle_kind when 'reclaimed' then jsonb_build_object('new_lease_epoch', s.epoch) end
        from started s
    ), watched as (
        insert into flowfabric.timer (kind, due_at, partitions, ids)
        select 'lease', p_expires, array_agg(s.partition), array_agg(s.id) from started s having count(*) > 0
    ), limited as (
        insert into flowfabric.timer (kind, due_at, partitions, ids)
        select 'attempt', s.attempt_timeout_at, array_agg(s.partition), array_agg(s.id)
        from started s where s.attempt_timeout_at is not null group by s.attempt_timeout_at
    ), touched as (
        insert into flowfabric.flow_touched
        select distinct s.partition, s.flow_id from started s where s.flow_id is not null
    )
    select s.partition, s.id, s.handle_kind, s.attempt_index, s.attempt_id, coalesce(s.attempt_type, 'initial'), s.lease_id, s.epoch,
           p_expires, r.lane, r.kind, s.namespace, s.flow_id, s.priority, s.created_at,
           coalesce((s.i).payload, s.payload),
           case when (s.i).payload is null then s.payload_encoding else (s.i).encoding end,
           s.tags, s.deadline_at, s.attempt_timeout_at, s.retries, s.reclaims, s.replays,
           (s.i).upstreams, (s.i).states, (s.i).results, (s.i).encodings, s.durability, s.has_steps
    from (select x.*, case when x.has_inputs then flowfabric.inputs_of(x.partition, x.id) end as i
          from started x offset 0) s
    join flowfabric.route r on r.id = s.route;   -- in the order of the positions given
end;
$$;

-- continues: whether a claim continues the attempt that was interrupted instead of starting another.
create or replace function flowfabric.continues(p_pending text, p_lease_lost text) returns boolean
language sql immutable as $$ select p_pending = 'interrupted' and p_lease_lost is null $$;

-- keep_attempts: move replaced attempts to the history; those of a lost lease as interrupted.
create or replace function flowfabric.keep_attempts(p_tids tid[], p_now timestamptz) returns void
language plpgsql as $$
begin
    insert into flowfabric.attempt
    select (flowfabric.latest_attempt(e, w)).*
    from unnest(p_tids) as u (tid)
    join flowfabric.execution e on e.ctid = u.tid
    left join flowfabric.worker w on w.id = e.worker
    where e.attempts > 0 and e.pending <> 'interrupted';
    insert into flowfabric.attempt
    select (flowfabric.latest_attempt(jsonb_populate_record(e, jsonb_build_object(
                'attempt_ended_at', p_now, 'disposition', 'reclaimed',
                'reclaim_reason', coalesce(e.reclaim_reason, case e.lease_lost when 'expired'
                    then 'lease_expired_reclaimable' else 'lease_revoked' end))), w)).*
    from unnest(p_tids) as u (tid)
    join flowfabric.execution e on e.ctid = u.tid
    left join flowfabric.worker w on w.id = e.worker
    where e.lease_lost is not null;
end;
$$;

-- uuid_seed: the first 23 digits of a random UUID (version 4), which nine more complete.
create or replace function flowfabric.uuid_seed(p_text text) returns text
language sql immutable as $$
    select overlay(overlay(substr(md5(p_text), 1, 23) placing '4' from 13) placing 'a' from 17)
$$;

-- durability_of: whether frames wait for their commit by default: durable; null: buffered.
create or replace function flowfabric.durability_of(p_policy json) returns text
language sql immutable as $$ select p_policy -> 'stream_policy' ->> 'durability_mode' $$;
