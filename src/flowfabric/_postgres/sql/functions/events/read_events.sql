-- read_events: committed events after a number, in order, without gaps
--
-- p_family is lease, completion, operator, signal or null for all.
-- Returns  the events, then one row with only the number up to which the log was read, unless the page is full.
create or replace function flowfabric.read_events(
    p_family text, p_after bigint, p_limit integer, p_namespace text, p_tag_key text, p_tag_value text)
returns table (seq bigint, occurred_at timestamptz, partition integer, id uuid, flow_id uuid, namespace text,
               tags jsonb, lease_type text, outcome text, operator_type text, signal_effect text, lease_id uuid,
               lease_epoch bigint, attempt_id uuid, attempt_index integer, worker_id text, worker_instance_id text, reason text,
               revoked_by text, details jsonb)
language plpgsql volatile security definer as $$
#variable_conflict use_column
declare
    v_upto bigint;
    v_found integer;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception 'the event log can only be read in a transaction at READ COMMITTED' using errcode = 'FF002';
    end if;
    v_upto := flowfabric.log_end();
    return query
    select e.seq, e.occurred_at, e.partition, e.id, e.flow_id, e.namespace, e.tags, e.lease_type, e.outcome,
           e.operator_type, e.signal_effect, e.lease_id, e.lease_epoch, e.attempt_id, e.attempt_index, e.worker_id,
           e.worker_instance_id, e.reason, e.revoked_by, e.details
    from flowfabric.event e
    where e.seq > p_after and e.seq <= v_upto
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
