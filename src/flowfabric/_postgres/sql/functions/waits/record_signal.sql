-- record_signal: record a signal on a waitpoint, and resume the execution if that satisfies its condition
--
-- Called by deliver_signal and signal_by_key with the execution e as lock_signalled returned it, under its lock: signal,
-- suspend, resume and timeout run one after another.
-- Takes    p_checked: the digest of the schema that the sender checked the payload with, empty for none; null if the sender
--          checks nothing.
-- Returns  one row: accepted with the effect, duplicate with the signal that exists (`detail`: why it was set aside, if it was),
--          or the reason it was refused.
--          unchecked: nothing is recorded yet, `detail` is the schema that the payload has to fit.
create or replace function flowfabric.record_signal(
    e flowfabric.signalled, p_waitpoint uuid, p_signal uuid, p_name text, p_category text, p_source_type text,
    p_source_identity text, p_payload bytea, p_encoding text, p_correlation text, p_idempotency_key text, p_scope text,
    p_created_at timestamptz, p_dedup_ms bigint, p_delay_ms bigint, p_max_signals bigint, p_maxlen bigint,
    p_checked bytea, out code text, out detail text, out signal_id uuid, out effect text, out match_detail text)
language plpgsql as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    w record;   -- the waitpoint, the open suspension, and related facts
    v_most bigint := coalesce(p_max_signals, e.max_signals, 10000);
    v_existing uuid;
    v_is_redacted boolean;
    v_holds boolean := false;
    v_weight record;        -- what the signal does for the condition
    v_is_first boolean := false;
    v_source bigint;        -- set if a leaf of the condition counts the source
    v_satisfiers uuid[];
    v_idle bigint;          -- signals of the waitpoint that contribute to nothing
begin
    signal_id := p_signal;
    if p_created_at is not null then
        perform flowfabric.check_time(p_created_at);
    end if;
    -- Its rows change only under the lock of the execution: one read, with a snapshot younger than the lock. The
    -- suspension: see open_suspension.
    select flowfabric.now() as at, x.waitpoint_key, x.suspension_id, x.state, x.expires_at, x.outlives_attempt, x.counted_by,
           x.payload_schema, s.signal_id as existing, s.refused,
           coalesce((select g.ordinal from flowfabric.signal g where g.partition = e.partition and g.id = e.id
                     order by g.ordinal desc limit 1), 0) + 1 as ordinal,
           u.suspension_id as open_suspension, u.number, u.waitpoint_ids, u.resume_condition, u.counts, u.keeps_waitpoints,
           (u.resume_policy ->> 'resume_delay_ms')::bigint as delay_ms
    into w
    from flowfabric.waitpoint x
    left join lateral (select g.signal_id, g.refused from flowfabric.signal g
                       where g.signal_id = p_signal and (g.partition, g.id) is not distinct from (e.partition, e.id) limit 1) s on true
    left join lateral (select n.* from flowfabric.suspension n where n.partition = e.partition and n.id = e.id
                       order by n.number desc limit 1) u on u.closed_at is null
    where x.partition = e.partition and x.waitpoint_id = p_waitpoint and x.id = e.id;
    if not found then
        code := 'waitpoint_not_found';
        return;
    end if;
    v_now := w.at; v_existing := w.existing;

    if v_existing is null and p_idempotency_key <> '' and p_dedup_ms > 0 then
        select g.signal_id into v_existing from flowfabric.signal g
        where g.partition = e.partition and g.waitpoint_id = p_waitpoint and g.idempotency_key = p_idempotency_key
          and g.accepted_at > v_now - flowfabric.ms(p_dedup_ms) and g.refused is null
        order by g.ordinal + 0 desc limit 1;   -- not in the order of an index: that would read all signals
    end if;
    if v_existing is not null then
        code := 'duplicate'; signal_id := v_existing; effect := 'deduped'; detail := w.refused;
        if e.completed_at is not null then
            -- The events of one that was redacted name no sender any more.
            select x.payload_encoding = 'redacted' and x.payload = '' into v_is_redacted
            from flowfabric.execution x where x.partition = e.partition and x.id = e.id;
        end if;
        perform flowfabric.log_signal(e.partition, e.id, e.route, e.flow_id, e.namespace, e.tags, effect, signal_id, p_waitpoint,
                                      case when v_is_redacted then '' else p_source_identity end, v_now);
        return;
    end if;

    if e.completed_at is not null then
        code := 'target_not_signalable';
    elsif w.state in ('closed', 'expired') then
        code := 'waitpoint_closed';
    elsif w.state = 'pending' and w.expires_at <= v_now then
        perform flowfabric.expire_waitpoints(array[e.partition], array[e.id], v_now);
        code := 'waitpoint_closed';
    elsif w.state = 'active' and e.state <> 'suspended' then
        raise warning 'waitpoint % is active, its execution is not suspended', p_waitpoint;
        code := 'target_not_signalable';
    elsif w.state = 'active' and w.suspension_id is distinct from w.open_suspension then
        raise warning 'waitpoint % is active for a suspension that is not open', p_waitpoint;
        code := 'waitpoint_closed';
    elsif length(p_payload) > 65536 then
        code := 'payload_too_large'; detail := length(p_payload) || ' bytes, 65536 are allowed';
    elsif v_most > 0 and w.ordinal > v_most then
        code := 'signal_limit_exceeded'; detail := v_most || ' signals';
    elsif p_checked is not null and w.payload_schema is not null
          and sha256(convert_to(w.payload_schema, 'UTF8')) <> p_checked then
        code := 'unchecked'; detail := w.payload_schema;
    end if;
    if code is not null then
        return;
    end if;

    if w.state = 'pending' then
        effect := 'buffered_for_pending_waitpoint'; match_detail := 'not_evaluated';
    elsif w.keeps_waitpoints then
        -- Of several waits: the handler evaluates them.
        v_holds := true; match_detail := 'advanced'; v_satisfiers := array[p_signal];
    elsif w.resume_condition ? 'Single' and w.resume_condition -> 'Single' ->> 'waitpoint_key' = w.waitpoint_key
          and w.resume_condition -> 'Single' -> 'matcher' = '"Wildcard"' then
        -- The most common condition; no other signal can have satisfied it.
        v_holds := true; match_detail := 'advanced'; v_satisfiers := array[p_signal];
    else
        select x.* into v_weight
        from flowfabric.weigh_signal(e.partition, w.suspension_id, w.resume_condition, w.counts, w.counted_by, w.waitpoint_key,
                                     p_name, p_source_type, p_source_identity) x;
        v_holds := v_weight.holds; match_detail := v_weight.detail; v_is_first := match_detail = 'advanced';
        v_source := v_weight.source_hash; w.counted_by := v_weight.counted_by;
        if v_holds then
            v_satisfiers := array[p_signal];
            if 0 < any (w.counts) then
                v_satisfiers := (flowfabric.recorded_on(e.partition, w.waitpoint_ids, true)).ids || v_satisfiers;
            end if;
        end if;
        w.counts := v_weight.counts;
    end if;
    effect := coalesce(effect, case when v_holds then 'resume_condition_satisfied' else 'appended_to_waitpoint' end);
    insert into flowfabric.signal
        (partition, id, ordinal, signal_id, waitpoint_id, waitpoint_key, suspension_id, signal_name, signal_category,
         source_type, source_identity, correlation_id, payload, payload_encoding, idempotency_key, target_scope,
         created_at, accepted_at, observed_effect, match_detail, source_hash)
    values
        (e.partition, e.id, w.ordinal, p_signal, p_waitpoint, w.waitpoint_key, w.suspension_id, p_name, p_category,
         p_source_type, p_source_identity, coalesce(p_correlation, ''), p_payload, p_encoding, nullif(p_idempotency_key, ''),
         p_scope, coalesce(p_created_at, v_now), v_now, effect, match_detail, v_source);
    if v_holds then
        perform flowfabric.close_suspension(e.partition, e.id, w.number, w.waitpoint_ids, 'resumed', 'signal',
                                            p_waitpoint, p_signal, v_satisfiers, w.outlives_attempt, v_now);
        perform flowfabric.resume(e.partition, e.id, coalesce(p_delay_ms, w.delay_ms, 0), v_now);
    else
        v_idle := flowfabric.count_signal(e.partition, p_waitpoint, v_is_first, w.counted_by, v_now);
        if w.state = 'active' then
            update flowfabric.suspension x set last_signal_at = v_now, counts = w.counts
            where x.partition = e.partition and x.id = e.id and x.number = w.number;
            if v_idle > p_maxlen then
                perform flowfabric.drop_signals(e.partition, p_waitpoint, v_idle - p_maxlen);
            end if;
        elsif e.is_parked and exists (select from flowfabric.waiter x where x.awaited_partition = e.partition
                                      and x.awaited_id = p_waitpoint and x.id = e.id) then
            -- It waits for more than signals: the handler evaluates its waits.
            perform flowfabric.promote(array[e.partition], array[e.id], v_now);
        end if;
    end if;
    perform flowfabric.log_signal(e.partition, e.id, e.route, e.flow_id, e.namespace, e.tags, effect, p_signal, p_waitpoint,
                                  p_source_identity, v_now);
    code := 'accepted';
end;
$$;

-- weigh_signal: what a new signal does for the condition of an open suspension
--
-- Reads no other signal: the suspension has what each leaf counted so far, a waitpoint which leaves counted it, and an index
-- finds a source that was counted.
-- Takes    p_counts, p_counted_by: of the suspension and the waitpoint, before the signal.
-- Returns  whether the condition holds with it, what the signal did, the same two after it, and the hash of its source if a
--          leaf counts that.
create or replace function flowfabric.weigh_signal(
    p_partition integer, p_suspension uuid, p_condition jsonb, p_counts integer[], p_counted_by integer[], p_key text,
    p_name text, p_source_type text, p_source_identity text,
    out holds boolean, out detail text, out counts integer[], out counted_by integer[], out source_hash bigint)
language plpgsql as $$
declare
    l record;
    v_number integer := 0;
    v_hash bigint;
    v_is_new boolean;
    v_is_first boolean := false;
    v_passes boolean := false;
    v_is_named boolean := false;
begin
    holds := true; counts := '{}'; counted_by := p_counted_by;
    for l in select x.keys, x.matcher, x.kind, x.wants from flowfabric.leaves(p_condition) x loop
        v_number := v_number + 1;
        v_is_new := false;
        if p_key = any (l.keys) then
            v_is_named := true;
            if l.wants is not null and flowfabric.passes(l.matcher, p_name) then
                v_passes := true;
                if l.kind = 'DistinctSignals' then
                    v_is_new := true;
                elsif l.kind = 'Single' then
                    v_is_new := coalesce(p_counts[v_number], 0) = 0;
                elsif l.kind = 'DistinctWaitpoints' then
                    v_is_new := v_number <> all (p_counted_by);
                    if v_is_new then
                        counted_by := counted_by || v_number;
                    end if;
                else
                    v_hash := flowfabric.source_hash(p_suspension, p_source_type, p_source_identity);
                    v_is_new := not exists (
                        select from flowfabric.signal g where g.source_hash = v_hash
                        -- As a row: no other index is of use.
                        and (g.partition, g.suspension_id, g.source_type, g.source_identity)
                            is not distinct from (p_partition, p_suspension, p_source_type, p_source_identity)
                        and g.waitpoint_key = any (l.keys) and flowfabric.passes(l.matcher, g.signal_name));
                    if v_is_new then
                        source_hash := v_hash;
                    end if;
                end if;
            end if;
        end if;
        v_is_first := v_is_first or v_is_new;
        counts := counts || coalesce(p_counts[v_number], 0) + v_is_new::integer;
        holds := holds and coalesce(counts[v_number] >= l.wants, false);
    end loop;
    holds := holds and v_number > 0;
    detail := flowfabric.match_detail(v_is_first, v_passes, v_is_named);
end;
$$;

-- count_signal: count a signal that does not resume the execution. Returns how many signals of the waitpoint are idle:
-- neither dropped nor counted for a condition.
create or replace function flowfabric.count_signal(
    p_partition integer, p_waitpoint uuid, p_matched boolean, p_counted_by integer[], p_now timestamptz) returns bigint
language sql volatile as $$
    update flowfabric.waitpoint x
    set signal_count = x.signal_count + 1, last_signal_at = p_now,
        matched_signal_count = x.matched_signal_count + p_matched::integer, counted_by = p_counted_by
    where x.partition = p_partition and x.waitpoint_id = p_waitpoint
    returning x.signal_count - x.matched_signal_count - x.dropped_signal_count
$$;

-- log_signal: the event of a delivery; never a token or a payload.
create or replace function flowfabric.log_signal(
    p_partition integer, p_id uuid, p_route integer, p_flow uuid, p_namespace text, p_tags jsonb, p_effect text,
    p_signal uuid, p_waitpoint uuid, p_identity text, p_now timestamptz) returns void
language plpgsql as $$
declare
    v_slot smallint := flowfabric.open_log(p_now);
begin
    insert into flowfabric.event (slot, route, occurred_at, partition, id, flow_id, namespace, tags, signal_effect, details)
    values (v_slot, p_route, p_now, p_partition, p_id, p_flow, p_namespace, p_tags, p_effect,
            jsonb_build_object('signal_id', p_signal, 'waitpoint_id', p_waitpoint,
                               'source_identity', nullif(p_identity, '')));
end;
$$;

-- drop_signals: the oldest signals of a waitpoint that contribute to nothing; their identity is kept.
create or replace function flowfabric.drop_signals(p_partition integer, p_waitpoint uuid, p_count bigint) returns void
language plpgsql as $$
declare
    v_after integer := (select w.dropped_upto from flowfabric.waitpoint w
                        where w.partition = p_partition and w.waitpoint_id = p_waitpoint);
begin
    with dropped as (
        update flowfabric.signal g
        set is_dropped = true, payload = null, signal_name = '', source_identity = '', correlation_id = ''
        -- By position: a join of two lists of thousands would be nested.
        where g.ctid = any (array(
            select x.ctid from flowfabric.signal x
            where x.partition = p_partition and x.waitpoint_id = p_waitpoint and x.ordinal > v_after
              and not x.is_dropped and x.match_detail <> 'advanced' order by x.ordinal limit p_count))
        returning g.ordinal
    )
    update flowfabric.waitpoint w
    set dropped_signal_count = w.dropped_signal_count + p_count,
        dropped_upto = greatest(w.dropped_upto, (select max(d.ordinal) from dropped d))
    where w.partition = p_partition and w.waitpoint_id = p_waitpoint;
end;
$$;
