-- read_events: committed events after a cursor, in order, without gaps
--
-- p_family is lease, completion, operator, signal or null for all. One call looks at p_most numbers at most, whatever the
-- filter. A cursor after which events are missing is refused (check_cursor).
-- Returns  the events, then one row with the current epoch, and the number up to which the log was read: that of the last
--          event, and only if another than the last one returned. Not the last number drawn: no event may have it.
-- Roles    read, operate
create or replace function flowfabric.read_events(
    p_family text, p_after bigint, p_epoch bigint, p_limit integer, p_namespace text, p_tag_key text, p_tag_value text,
    p_most integer)
returns table (seq bigint, occurred_at timestamptz, partition integer, id uuid, flow_id uuid, namespace text,
               tags jsonb, lease_type text, outcome text, operator_type text, signal_effect text, lease_id uuid,
               lease_epoch bigint, attempt_id uuid, attempt_index integer, worker_id text, worker_instance_id text, reason text,
               revoked_by text, details jsonb, parent_id uuid, log_epoch bigint)
language plpgsql volatile security definer as $$
#variable_conflict use_column
declare
    v_upto bigint;
    v_next bigint;
    v_read bigint;
    v_floor bigint;
    v_found integer;
    v_sees boolean := flowfabric.may_operate();
begin
    v_upto := flowfabric.log_end();
    v_next := flowfabric.check_cursor(p_after, p_epoch);
    if v_next <= v_upto then
        -- From the next event on: numbers that were never used, or whose events were removed, are passed over.
        v_upto := least(v_upto, v_next + p_most - 1);
        return query
        select e.seq, e.occurred_at, e.partition, e.id, e.flow_id, e.namespace, e.tags, e.lease_type, e.outcome,
               e.operator_type, e.signal_effect, case when v_sees then e.lease_id end, e.lease_epoch, e.attempt_id, e.attempt_index, w.worker_id,
               w.worker_instance_id, e.reason, e.revoked_by, e.details, e.parent_id, null::bigint
        from flowfabric.event e left join flowfabric.worker w on w.id = e.worker
        where e.seq >= v_next and e.seq <= v_upto
          and case p_family when 'lease' then e.lease_type is not null when 'completion' then e.outcome is not null
                            when 'operator' then e.operator_type is not null when 'signal' then e.signal_effect is not null
                            else true end
          and (p_namespace is null or e.namespace = p_namespace)
          and (p_tag_key is null or coalesce(e.tags ->> p_tag_key = p_tag_value, false))
        order by e.seq limit p_limit;
        get diagnostics v_found = row_count;
        if v_found < p_limit and (p_family is not null or p_namespace is not null or p_tag_key is not null) then
            select e.seq into v_read from flowfabric.event e where e.seq >= v_next and e.seq <= v_upto
            order by e.seq desc limit 1;
        end if;
    end if;
    seq := v_read;
    select l.epoch, d.event_floor into log_epoch, v_floor
    from flowfabric.deployment d, flowfabric.log_epoch l where l.last_position is null;
    if p_after < v_floor and p_after <> 0 then
        perform flowfabric.check_cursor(p_after, p_epoch);   -- events were removed between the statements
    end if;
    return next;
end;
$$;
