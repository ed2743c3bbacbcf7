-- deliver_signal: record a signal on a waitpoint, and resume the execution if that satisfies its condition
--
-- Called with the token, which is the right to do it.
-- Takes    p_checked: see record_signal.
-- Locks    nothing before the token is verified, then the execution.
-- Returns  one row: as record_signal; invalid_token or not_found.
-- Roles    submit, work, operate
create or replace function flowfabric.deliver_signal(
    p_partition integer, p_id uuid, p_waitpoint uuid, p_token text, p_signal uuid, p_name text,
    p_category text, p_source_type text, p_source_identity text, p_payload bytea, p_encoding text, p_correlation text,
    p_idempotency_key text, p_scope text, p_created_at timestamptz, p_dedup_ms bigint, p_delay_ms bigint,
    p_max_signals bigint, p_maxlen bigint, p_checked bytea default null)
returns table (code text, detail text, signal_id uuid, effect text, match_detail text)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    e flowfabric.signalled;
begin
    perform flowfabric.require_read_committed();
    signal_id := p_signal;
    detail := flowfabric.check_token(p_partition, p_id, p_waitpoint, p_token);
    if detail is not null then
        code := 'invalid_token';
        perform flowfabric.note_bad_token(p_partition, p_id);
        return next;
        return;
    end if;
    e := flowfabric.lock_signalled(p_partition, p_id);
    if e.id is null then
        code := 'not_found';   -- purged since the token was verified
        return next;
    else
        return query
        select r.code, r.detail, r.signal_id, r.effect, r.match_detail
        from flowfabric.record_signal(
            e, p_waitpoint, p_signal, p_name, p_category, p_source_type, p_source_identity, p_payload, p_encoding,
            p_correlation, p_idempotency_key, p_scope, p_created_at, p_dedup_ms, p_delay_ms, p_max_signals, p_maxlen, p_checked) r;
    end if;
end;
$$;

-- note_bad_token: record an invalid token, at most once a second; never waits.
create or replace function flowfabric.note_bad_token(p_partition integer, p_id uuid) returns void
language sql volatile as $$
    update flowfabric.execution e set hmac_failed_at = f.at
    from (select x.ctid as tid, flowfabric.now() as at from flowfabric.execution x
          where x.partition = p_partition and x.id = p_id
            and (x.hmac_failed_at is null or x.hmac_failed_at <= flowfabric.now() - interval '1 second')
          for no key update skip locked) f
    where e.ctid = f.tid
$$;
