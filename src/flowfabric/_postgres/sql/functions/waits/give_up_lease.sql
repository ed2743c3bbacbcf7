-- give_up_lease: the execution of a suspension that was just written becomes suspended and loses its lease.
create or replace function flowfabric.give_up_lease(s flowfabric.suspension, p_now timestamptz) returns void
language plpgsql as $$
declare
    v_slot smallint := flowfabric.open_log(p_now);
    v_limited boolean;
begin
    with paused as (
        update flowfabric.execution e
        set state = 'suspended', pending = 'interrupted', epoch = e.epoch + 1, has_waitpoints = true,
            suspension_timeout_at = s.timeout_at, blocking_reason = flowfabric.suspension_blocks(s.reason_code),
            blocking_detail = case when s.keeps_waitpoints then flowfabric.waits_for('{}', '{}', s.waitpoint_keys, null)
                                   else 'waitpoint ' || s.waitpoint_ids[1] || ': ' || s.reason_code end,
            attempt_suspended_at = p_now,
            attempt_timeout_left = case when e.attempt_timeout_at is not null
                then greatest(e.attempt_timeout_at - p_now, interval '1 millisecond') end,
            attempt_timeout_at = null, transitioned_at = p_now, mutated_at = null
        where e.partition = s.partition and e.id = s.id
        returning e.*
    ), logged as (
        insert into flowfabric.event
            (slot, occurred_at, partition, id, flow_id, namespace, tags, lease_type, lease_id, lease_epoch, attempt_id,
             attempt_index, worker, reason, revoked_by)
        select v_slot, p_now, p.partition, p.id, p.flow_id, p.namespace, p.tags, 'revoked', p.lease_id, p.epoch - 1,
               p.attempt_id, p.attempt_index, p.worker, 'suspend', 'backend'
        from paused p
    )
    select p.limits is not null into v_limited from paused p;
    if v_limited then
        perform flowfabric.give_slots(array[s.partition], array[s.id], false, p_now);
    end if;
    if s.timeout_at is not null then
        perform flowfabric.set_timers('suspension', array[s.partition], array[s.id], array[s.timeout_at]);
    end if;
    if (select e.has_reserved from flowfabric.execution e where e.partition = s.partition and e.id = s.id) then
        perform flowfabric.end_reservations(array[s.partition], array[s.id], false, p_now);
    end if;
    insert into flowfabric.flow_touched
    select e.partition, e.flow_id from flowfabric.execution e
    where e.partition = s.partition and e.id = s.id and e.flow_id is not null;
end;
$$;
