-- read_events: committed events after a number, in order, without gaps
--
-- p_family is lease, completion, operator, signal or null for all. One call looks at p_most numbers at most, whatever the
-- filter. A number beyond the end of the log or below its beginning is refused: events after it are missing.
-- Returns  the events, then one row with only the number up to which the log was read, unless the page is full.
create or replace function flowfabric.read_events(
    p_family text, p_after bigint, p_limit integer, p_namespace text, p_tag_key text, p_tag_value text,
    p_most integer)
returns table (seq bigint, occurred_at timestamptz, partition integer, id uuid, flow_id uuid, namespace text,
               tags jsonb, lease_type text, outcome text, operator_type text, signal_effect text, lease_id uuid,
               lease_epoch bigint, attempt_id uuid, attempt_index integer, worker_id text, worker_instance_id text, reason text,
               revoked_by text, details jsonb)
language plpgsql volatile security definer as $$
#variable_conflict use_column
declare
    v_from bigint;
    v_upto bigint;
    v_found integer;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception 'the event log can only be read in a transaction at READ COMMITTED' using errcode = 'FF002';
    end if;
    v_upto := flowfabric.log_end();
    v_from := flowfabric.check_position(p_after);
    v_upto := least(v_upto, v_from + p_most);
    return query
    select e.seq, e.occurred_at, e.partition, e.id, e.flow_id, e.namespace, e.tags, e.lease_type, e.outcome,
           e.operator_type, e.signal_effect, e.lease_id, e.lease_epoch, e.attempt_id, e.attempt_index, w.worker_id,
           w.worker_instance_id, e.reason, e.revoked_by, e.details
    from flowfabric.event e left join flowfabric.worker w on w.id = e.worker
    where e.seq > v_from and e.seq <= v_upto
      and case p_family when 'lease' then e.lease_type is not null when 'completion' then e.outcome is not null
                        when 'operator' then e.operator_type is not null when 'signal' then e.signal_effect is not null
                        else true end
      and (p_namespace is null or e.namespace = p_namespace)
      and (p_tag_key is null or coalesce(e.tags ->> p_tag_key = p_tag_value, false))
    order by e.seq limit p_limit;
    get diagnostics v_found = row_count;
    if v_found < p_limit then
        seq := greatest(v_upto, p_after);
        return next;
    end if;
end;
$$;

-- check_position: refuse a number after which events are missing; returns the number before the next event.
create or replace function flowfabric.check_position(p_after bigint) returns bigint
language plpgsql volatile as $$
declare
    v_last bigint;
    v_floor bigint;
    v_next bigint;
begin
    select n.last_value, d.event_floor into v_last, v_floor from flowfabric.event_number n, flowfabric.deployment d;
    if p_after > v_last then
        raise exception 'the log ends at %', v_last using errcode = 'FF005', detail = v_last::text;
    elsif p_after < v_floor and p_after <> 0 then
        raise exception 'events up to % were removed', v_floor using errcode = 'FF006', detail = v_floor::text;
    end if;
    -- Numbers that were never used, or whose events were removed, are passed over.
    select e.seq into v_next from flowfabric.event e where e.seq > p_after order by e.seq limit 1;
    return greatest(p_after, v_next - 1);
end;
$$;
