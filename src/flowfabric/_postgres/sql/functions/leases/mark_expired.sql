-- mark_expired: active and leased -> active with an expired lease, which any worker may reclaim.
--
-- The caller holds the locks and has checked that the leases expired.
create or replace function flowfabric.mark_expired(p_partition integer[], p_id uuid[], p_now timestamptz)
returns void
language plpgsql as $$
declare
    v_slot smallint := flowfabric.open_log(p_now);
begin
    with lost as (
        update flowfabric.execution e
        set lease_lost = 'expired', lease_lost_at = p_now, blocking_reason = 'waiting_for_worker',
            blocking_detail = 'lease expired, awaiting reclaim', pending = 'interrupted',
            transitioned_at = p_now, mutated_at = null
        from unnest(p_partition, p_id) as u (partition, id)
        where e.partition = u.partition and e.id = u.id
        returning e.*
    )
    insert into flowfabric.event
        (slot, occurred_at, partition, id, flow_id, namespace, tags, lease_type, lease_id, lease_epoch, attempt_id,
         attempt_index, worker, reason)
    select v_slot, p_now, l.partition, l.id, l.flow_id, l.namespace, l.tags, 'expired',
           l.lease_id, l.epoch, l.attempt_id, l.attempt_index, l.worker, 'lease_expired'
    from lost l;
    if exists (select from unnest(p_partition, p_id) as u (partition, id)
               join flowfabric.execution e on e.partition = u.partition and e.id = u.id where e.has_reserved) then
        perform flowfabric.end_reservations(p_partition, p_id, true, p_now);
    end if;
    perform flowfabric.offer_lost(p_partition, p_id);
    perform flowfabric.wake_tails(p_partition, p_id);
end;
$$;
