-- read_events: committed events after a cursor, in order, without gaps
--
-- An event is returned if it passes any of the filters. One call looks at p_most numbers at most, whatever they are. A cursor
-- after which events are missing is refused (check_cursor).
-- Takes    one element of each array for each filter. p_families: bits, as in takes_event. The others: null: any.
-- Returns  the events, then one row with the current epoch, and the number up to which the log was read: that of the last
--          event, and only if another than the last one returned. Not the last number drawn: no event may have it.
--          at_end: the log was read up to its end. is_busy: as in log_state.
-- Roles    read, operate
create or replace function flowfabric.read_events(
    p_families integer[], p_namespaces text[], p_tag_keys text[], p_tag_values text[], p_flows uuid[], p_ids uuid[],
    p_kinds text[], p_after bigint, p_epoch bigint, p_limit integer, p_most integer)
returns table (seq bigint, occurred_at timestamptz, partition integer, id uuid, flow_id uuid, namespace text,
               tags jsonb, lease_type text, outcome text, operator_type text, signal_effect text, worker_type text,
               lease_id uuid, lease_epoch bigint, attempt_id uuid, attempt_index integer, worker_id text,
               worker_instance_id text, reason text, revoked_by text, details jsonb, parent_id uuid, lane text, kind text,
               actor text, log_epoch bigint, at_end boolean, is_busy boolean)
language plpgsql volatile security definer as $$
#variable_conflict use_column
declare
    v_state record;
    v_upto bigint;
    v_next bigint;
    v_read bigint;
    v_floor bigint;
    v_found integer := 0;
    v_sees boolean := flowfabric.may_operate();
    v_all boolean;
    v_routes integer[];
begin
    v_state := flowfabric.log_state();
    v_upto := v_state.upto;
    v_next := flowfabric.check_cursor(p_after, p_epoch);
    at_end := v_next is null or v_next > v_upto;
    if not at_end then
        -- From the next event on: numbers that were never used, or whose events were removed, are passed over.
        at_end := v_upto < v_next + p_most;
        v_upto := least(v_upto, v_next + p_most - 1);
        v_all := cardinality(p_families) = 1 and p_families[1] = 63 and coalesce(
            p_namespaces[1], p_tag_keys[1], p_flows[1]::text, p_ids[1]::text, p_kinds[1]) is null;
        if cardinality(p_families) = 1 then
            v_routes := case when p_kinds[1] is not null
                             then array(select x.id from flowfabric.route x where x.kind = p_kinds[1]) end;
            return query
            select s.*, null::bigint, null::boolean, null::boolean
            from flowfabric.event e
            left join flowfabric.worker w on w.id = e.worker
            left join flowfabric.route r on r.id = e.route
            cross join lateral flowfabric.shown_event(e, w, r, v_sees) s
            where e.seq >= v_next and e.seq <= v_upto
              and (v_all or (flowfabric.takes_event(
                                 p_families[1], e.lease_type, e.outcome, e.operator_type, e.signal_effect, e.worker_type)
                             and (p_namespaces[1] is null or e.namespace = p_namespaces[1])
                             and (p_tag_keys[1] is null or e.tags ->> p_tag_keys[1] = p_tag_values[1])
                             and (p_flows[1] is null or e.flow_id = p_flows[1])
                             and (p_ids[1] is null or e.id = p_ids[1])
                             and (v_routes is null or e.route = any (v_routes))))
            order by e.seq limit p_limit;
        else
            return query
            select s.*, null::bigint, null::boolean, null::boolean
            from flowfabric.event e
            left join flowfabric.worker w on w.id = e.worker
            left join flowfabric.route r on r.id = e.route
            cross join lateral flowfabric.shown_event(e, w, r, v_sees) s
            where e.seq >= v_next and e.seq <= v_upto
              and exists (select from unnest(p_families, p_namespaces, p_tag_keys, p_tag_values, p_flows, p_ids, p_kinds)
                                      as f (families, namespace, tag_key, tag_value, flow_id, id, kind)
                          where flowfabric.takes_event(
                                    f.families, e.lease_type, e.outcome, e.operator_type, e.signal_effect, e.worker_type)
                            and (f.namespace is null or e.namespace = f.namespace)
                            and (f.tag_key is null or e.tags ->> f.tag_key = f.tag_value)
                            and (f.flow_id is null or e.flow_id = f.flow_id)
                            and (f.id is null or e.id = f.id)
                            and (f.kind is null or r.kind = f.kind))
            order by e.seq limit p_limit;
        end if;
        get diagnostics v_found = row_count;
        if v_found < p_limit then
            if not v_all then
                select e.seq into v_read from flowfabric.event e where e.seq >= v_next and e.seq <= v_upto
                order by e.seq desc limit 1;
            end if;
        else
            at_end := false;
        end if;
    end if;
    seq := v_read;
    select l.epoch, d.event_floor into log_epoch, v_floor
    from flowfabric.deployment d, flowfabric.log_epoch l where l.last_position is null;
    if p_after < v_floor and p_after <> 0 then
        perform flowfabric.check_cursor(p_after, p_epoch);   -- events were removed between the statements
    end if;
    is_busy := v_state.is_busy;
    return next;
end;
$$;

-- takes_event: whether an event is of one of the families: 1 lease, 2 completion, 4 operator, 8 signal, 16 worker, 32
-- heartbeats of workers.
create or replace function flowfabric.takes_event(
    p_families integer, p_lease_type text, p_outcome text, p_operator_type text, p_signal_effect text, p_worker_type text)
returns boolean
language sql immutable as $$
    select (p_families & 1 <> 0 and p_lease_type is not null) or (p_families & 2 <> 0 and p_outcome is not null)
        or (p_families & 4 <> 0 and p_operator_type is not null) or (p_families & 8 <> 0 and p_signal_effect is not null)
        or (p_families & case p_worker_type when 'heartbeat' then 32 else 16 end <> 0 and p_worker_type is not null)
$$;
