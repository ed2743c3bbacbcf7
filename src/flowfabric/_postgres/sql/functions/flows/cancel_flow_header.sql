-- Cancelling a whole flow: its header, and the members that have to be cancelled.

-- cancel_flow_header: close a flow, and record which members have to be cancelled
--
-- Claimable targets are frozen here, later ones by make_ready: from now on none is claimed.
-- A flow that is closed stays as it is; the policy that it was closed with is applied again to members replayed since.
-- Locks    the flow, its backlog, then its members that have not ended, by id.
-- Returns  one row: ok, already_terminal or flow_not_found; what is stored; all members; how many are targets.
-- Roles    operate
create or replace function flowfabric.cancel_flow_header(
    p_partition integer, p_flow uuid, p_reason text, p_policy text, p_grace_ms bigint, p_requester text)
returns table (code text, policy text, reason text, members uuid[], targets integer)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_slot smallint;
    f flowfabric.flow;
    v_targets uuid[];
    v_frozen uuid[];
    v_policy text;
begin
    perform flowfabric.require_read_committed();
    select x.* into f from flowfabric.flow x where x.partition = p_partition and x.flow_id = p_flow for no key update;
    code := case when f.flow_id is null then 'flow_not_found' when f.state <> 'open' then 'already_terminal' else 'ok' end;
    v_policy := case when code = 'ok' then p_policy else f.cancellation_policy end;
    policy := v_policy;
    reason := case when code = 'ok' then p_reason else f.cancel_reason end;
    targets := 0;
    if code = 'ok' or code <> 'flow_not_found' and v_policy <> 'flow_only' and exists (
            select from flowfabric.execution e where e.flow_id = p_flow and e.completed_at is null and e.replays > 0
              and not exists (select from flowfabric.cancel_member m where m.partition = e.partition and m.id = e.id)) then
        perform 1 from flowfabric.cancel_backlog b where b.partition = p_partition and b.flow_id = p_flow for update;
        perform 1 from (select x.partition, x.id from flowfabric.execution x where x.flow_id = p_flow and x.completed_at is null) m
        join flowfabric.execution e on e.partition = m.partition and e.id = m.id
        order by e.id for no key update of e;
        v_now := flowfabric.now();
        v_slot := flowfabric.open_log(v_now);
        select array_agg(e.id), array_agg(e.id) filter (where e.state not in ('active', 'suspended')) into v_targets, v_frozen
        from flowfabric.execution e
        where e.flow_id = p_flow and e.completed_at is null and v_policy <> 'flow_only'
          and (v_policy = 'cancel_all' or e.state not in ('active', 'suspended'))
          and (code = 'ok' or e.replays > 0 and not exists (
                   select from flowfabric.cancel_member m where m.partition = e.partition and m.id = e.id));
        targets := coalesce(cardinality(v_targets), 0);
        update flowfabric.flow x
        set state = 'cancelled', cancelled_at = v_now, cancel_reason = p_reason, cancellation_policy = p_policy,
            last_mutation_at = v_now
        where x.partition = p_partition and x.flow_id = p_flow and code = 'ok';
        if targets > 0 then
            insert into flowfabric.cancel_backlog
                (partition, flow_id, requested_at, requester, reason, cancellation_policy, grace_until)
            values (p_partition, p_flow, v_now, p_requester, p_reason, v_policy,
                    least(v_now + flowfabric.ms(p_grace_ms), flowfabric.far_date()))   -- what clients can read
            on conflict do nothing;   -- others are still to be cancelled
            insert into flowfabric.cancel_member (partition, id, flow_id)
            select p_partition, u.id, p_flow from unnest(v_targets) u (id);
            -- Reclaimable until now.
            perform flowfabric.drop_ready(array_fill(p_partition, array[targets]), v_targets);
            if v_frozen is not null then
                perform flowfabric.freeze_members(array_fill(p_partition, array[cardinality(v_frozen)]), v_frozen, v_now);
            end if;
            perform flowfabric.wake_duties(v_now + flowfabric.ms(p_grace_ms));
        end if;
        if code = 'ok' or targets > 0 then
            insert into flowfabric.event (slot, occurred_at, partition, flow_id, namespace, tags, operator_type, reason, details)
            values (v_slot, v_now, p_partition, p_flow, f.namespace, nullif(f.tags, '{}'), 'flow_cancel_requested', p_reason,
                    jsonb_build_object('flow_id', p_flow, 'cancellation_policy', v_policy, 'reason', p_reason,
                                       'member_count', targets)
                    || case when code = 'ok' then '{}'::jsonb else '{"again": true}'::jsonb end);
            insert into flowfabric.flow_touched values (p_partition, p_flow);
        end if;
    end if;
    select coalesce(array_agg(e.id order by e.created_at, e.id), '{}') into members
    from flowfabric.execution e where e.flow_id = p_flow;
    return next;
end;
$$;
