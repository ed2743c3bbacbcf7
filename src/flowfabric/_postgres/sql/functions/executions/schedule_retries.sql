-- schedule_retries: active -> delayed, waiting for the backoff; the attempt ended in failure.
--
-- Called by fail and by the attempt timeout, under the locks they took.
create or replace function flowfabric.schedule_retries(
    p_partition integer[], p_id uuid[], p_reason text[], p_category text[], p_delay_ms bigint[],
    p_lease_reason text, p_revoked_by text, p_now timestamptz)
returns void
language plpgsql as $$
declare
    v_slot smallint := flowfabric.open_log(p_now);
    v_leased boolean[];
    v_limited boolean; v_had_reserved boolean;
begin
    select array_agg(e.lease_lost is null order by u.ord), bool_or(e.limits is not null), bool_or(e.has_reserved)
    into v_leased, v_limited, v_had_reserved
    from unnest(p_partition, p_id) with ordinality as u (partition, id, ord)
    join flowfabric.execution e on e.partition = u.partition and e.id = u.id;
    if false = any (v_leased) then
        perform flowfabric.drop_ready(p_partition, p_id);
    end if;
    with delayed as (
        update flowfabric.execution e
        set state = 'delayed', blocking_reason = 'waiting_for_retry_backoff', pending = 'retry',
            blocking_detail = 'retry at '
                || flowfabric.time_text(p_now + flowfabric.ms(u.delay))
                || ' after ' || u.category || ': ' || left(u.reason, 200),
            retries = e.retries + 1, delay_until = p_now + flowfabric.ms(u.delay),
            failure_reason = u.reason, failure_category = u.category,
            attempt_ended_at = p_now, disposition = 'retry_scheduled',
            retry_at = p_now + flowfabric.ms(u.delay),
            attempt_failure_reason = u.reason, attempt_failure_category = u.category,
            attempt_timeout_at = null, attempt_timeout_left = null, lease_lost = null,
            transitioned_at = p_now, mutated_at = null
        from unnest(p_partition, p_id, p_reason, p_category, p_delay_ms, v_leased)
             as u (partition, id, reason, category, delay, leased)
        where e.partition = u.partition and e.id = u.id
        returning e.*, u.leased
    )
    insert into flowfabric.event
        (slot, route, occurred_at, partition, id, flow_id, namespace, tags, lease_type, lease_id, lease_epoch, attempt_id,
         attempt_index, worker, reason, revoked_by)
    select v_slot, d.route, p_now, d.partition, d.id, d.flow_id, d.namespace, d.tags, 'revoked', d.lease_id, d.epoch,
           d.attempt_id, d.attempt_index, d.worker, p_lease_reason, p_revoked_by
    from delayed d where d.leased;
    if v_limited then
        perform flowfabric.give_slots(p_partition, p_id, false, p_now);
    end if;
    perform flowfabric.end_waits(array_agg(e.partition), array_agg(e.id), array_agg(null::text), p_now)
    from unnest(p_partition, p_id) as u (partition, id)
    join flowfabric.execution e on e.partition = u.partition and e.id = u.id and e.has_waitpoints
    having count(*) > 0;
    perform flowfabric.set_timers('delay', p_partition, p_id,
        (select array_agg(p_now + flowfabric.ms(d) order by ord) from unnest(p_delay_ms) with ordinality as x (d, ord)));
    if v_had_reserved then   -- a timeout is not reported by the holder: held amounts may have been used
        perform flowfabric.end_reservations(p_partition, p_id, p_revoked_by = 'reconciler', p_now);
    end if;
    perform flowfabric.gate(p_partition, p_id);
    perform flowfabric.wake_tails(p_partition, p_id);
end;
$$;
