-- revoke_lease: active and leased -> active with a revoked lease, which any worker may reclaim
--
-- Called by operators.
-- Locks    the execution.
-- Returns  ok with the lease just revoked (detail = lease id), already_satisfied with the reason, or not_found.
-- Roles    operate
create or replace function flowfabric.revoke_lease(
    p_partition integer, p_id uuid, p_expected_lease uuid, p_instance text, p_reason text)
returns setof flowfabric.verdict
language plpgsql security definer as $$
declare
    v_now timestamptz;
    e flowfabric.execution;
    v_already text;
    v_slot smallint;
begin
    e := flowfabric.lock_execution(p_partition, p_id);
    if e.id is null then
        return query select 1, 'not_found', null::text, null::text, null::bigint, null::uuid, null::timestamptz;
        return;
    end if;
    v_now := flowfabric.now();
    v_already := case
        when e.state <> 'active' then 'no_active_lease'
        when e.lease_lost = 'revoked' then 'already_revoked'
        when e.lease_lost = 'expired' then 'already_expired'
        when p_instance is not null and p_instance <> (
            select w.worker_instance_id from flowfabric.worker w where w.id = e.worker) then 'different_worker_instance_id'
        when p_expected_lease is not null and p_expected_lease <> e.lease_id then 'lease_id_mismatch' end;
    if v_already is not null then
        return query select 1, 'already_satisfied', v_already, e.state, e.epoch, e.attempt_id, null::timestamptz;
        return;
    end if;
    update flowfabric.execution x
    set lease_lost = 'revoked', lease_lost_at = v_now, lease_revoke_reason = p_reason, pending = 'interrupted',
        blocking_reason = 'waiting_for_worker', blocking_detail = 'lease revoked: ' || p_reason,
        transitioned_at = v_now, mutated_at = null
    where x.partition = p_partition and x.id = p_id;
    v_slot := flowfabric.open_log(v_now);
    insert into flowfabric.event
        (slot, route, occurred_at, partition, id, flow_id, namespace, tags, lease_type, lease_id, lease_epoch, attempt_id,
         attempt_index, worker, reason, revoked_by)
    values (v_slot, e.route, v_now, e.partition, e.id, e.flow_id, e.namespace, e.tags, 'revoked',
            e.lease_id, e.epoch, e.attempt_id, e.attempt_index, e.worker, p_reason, 'operator');
    if e.has_reserved then
        perform flowfabric.end_reservations(array[p_partition], array[p_id], true, v_now);
    end if;
    perform flowfabric.offer_lost(array[p_partition], array[p_id]);
    perform flowfabric.tell_holders(array[p_partition], array[p_id]);
    perform flowfabric.wake_tails(array[p_partition], array[p_id]);
    return query select 1, 'ok', e.lease_id::text, 'active', e.epoch, e.attempt_id, v_now;
end;
$$;
