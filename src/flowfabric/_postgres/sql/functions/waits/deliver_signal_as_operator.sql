-- deliver_signal_as_operator: deliver_signal without a token
--
-- Called for an operator that the caller has already authenticated.
-- Takes    p_lane: the lane that the operator named.
-- Locks    the execution.
-- Returns  one row: as record_signal; not_found, or invalid_input for another lane.
-- Roles    operate
create or replace function flowfabric.deliver_signal_as_operator(
    p_partition integer, p_id uuid, p_waitpoint uuid, p_lane text, p_signal uuid, p_name text,
    p_category text, p_source_type text, p_source_identity text, p_payload bytea, p_encoding text, p_correlation text,
    p_idempotency_key text, p_scope text, p_created_at timestamptz, p_dedup_ms bigint, p_delay_ms bigint,
    p_max_signals bigint, p_maxlen bigint)
returns table (code text, detail text, signal_id uuid, effect text, match_detail text)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    e flowfabric.signalled;
    v_lane text;
begin
    perform flowfabric.require_read_committed();
    signal_id := p_signal;
    e := flowfabric.lock_signalled(p_partition, p_id);
    select r.lane into v_lane from flowfabric.route r where r.id = e.route;
    if e.id is null then
        code := 'not_found';
        return next;
    elsif v_lane is distinct from p_lane then
        code := 'invalid_input'; detail := 'lane_mismatch: ' || v_lane;
        return next;
    else
        return query
        select r.code, r.detail, r.signal_id, r.effect, r.match_detail
        from flowfabric.record_signal(
            e, p_waitpoint, p_signal, p_name, p_category, p_source_type, p_source_identity, p_payload, p_encoding,
            p_correlation, p_idempotency_key, p_scope, p_created_at, p_dedup_ms, p_delay_ms, p_max_signals, p_maxlen, null) r;
    end if;
end;
$$;
