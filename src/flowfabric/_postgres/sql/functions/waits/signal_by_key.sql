-- signal_by_key: deliver a signal to the open waitpoint of an execution that has this key
--
-- Called by clients with access to the database, which need no token. Without a key the execution must have only one.
-- Of several waitpoints with the same key the signal reaches the one the execution waits at, else the newest.
-- Takes    p_checked: see record_signal.
-- If none is open, a signal accepted earlier with the same idempotency key is found at the closed one.
-- Locks    the execution.
-- Returns  one row: as record_signal; or several_open, waitpoint_not_found or not_found. `keys` are the open ones.
-- Roles    operate
create or replace function flowfabric.signal_by_key(
    p_partition integer, p_id uuid, p_key text, p_signal uuid, p_name text, p_category text, p_source_type text,
    p_source_identity text, p_payload bytea, p_encoding text, p_correlation text, p_idempotency_key text, p_scope text,
    p_dedup_ms bigint, p_delay_ms bigint, p_max_signals bigint, p_maxlen bigint, p_checked bytea default null)
returns table (code text, detail text, signal_id uuid, effect text, match_detail text, keys text[])
language plpgsql security definer as $$
#variable_conflict use_column
declare
    e flowfabric.signalled;
    v_waitpoint uuid;
begin
    perform flowfabric.require_read_committed();
    signal_id := p_signal;
    e := flowfabric.lock_signalled(p_partition, p_id);
    if e.id is null then
        code := 'not_found';
        return next;
        return;
    end if;
    -- Waitpoints change only under the lock of their execution.
    select (array_agg(w.waitpoint_id order by w.state = 'active' desc, w.created_at desc, w.waitpoint_id desc)
            filter (where p_key is null or w.waitpoint_key = p_key))[1],
           coalesce(array_agg(distinct w.waitpoint_key), '{}')
    into v_waitpoint, keys
    from (select x.waitpoint_id, x.waitpoint_key, x.state, x.created_at, x.expires_at from flowfabric.waitpoint x
          where x.partition = p_partition and x.id = p_id offset 0) w
    where w.state = 'active' or (w.state = 'pending' and w.expires_at > flowfabric.now());
    if p_key is null and cardinality(keys) > 1 then
        code := 'several_open';
        return next;
        return;
    end if;
    if v_waitpoint is null and p_idempotency_key <> '' then
        select w.waitpoint_id into v_waitpoint
        from (select x.waitpoint_id, x.waitpoint_key from flowfabric.waitpoint x
              where x.partition = p_partition and x.id = p_id offset 0) w
        join flowfabric.signal g on g.partition = p_partition and g.waitpoint_id = w.waitpoint_id
                                and g.idempotency_key = p_idempotency_key and g.refused is null
        where p_key is null or w.waitpoint_key = p_key
        order by g.accepted_at desc limit 1;
    end if;
    if v_waitpoint is null then
        code := 'waitpoint_not_found';
        if e.completed_at is null and exists (
               select from (select x.waitpoint_key from flowfabric.waitpoint x
                            where x.partition = p_partition and x.id = p_id offset 0) w
               where p_key is null or w.waitpoint_key = p_key) then
            detail := 'closed';   -- it may open again
        end if;
        return next;
        return;
    end if;
    select d.code, d.detail, d.signal_id, d.effect, d.match_detail into code, detail, signal_id, effect, match_detail
    from flowfabric.record_signal(
        e, v_waitpoint, p_signal, p_name, p_category, p_source_type, p_source_identity, p_payload, p_encoding,
        p_correlation, p_idempotency_key, p_scope, null, p_dedup_ms, p_delay_ms, p_max_signals, p_maxlen, p_checked) d;
    return next;
end;
$$;
