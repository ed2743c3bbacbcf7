-- The event log: numbered by a sequence, and read in that order.
--
-- A number is drawn before its transaction commits, so a reader must not pass one that may still appear. Two rules:
--   * who writes events first announces the last number given out so far, as an advisory lock held to the end of its
--     transaction: every number it draws is larger (open_log);
--   * who reads notes the last number given out, then looks at the announcements, and reads up to the smaller of them.
--     Whoever was not seen there has ended and is visible, or will draw larger numbers (read_events).
-- Numbers are drawn under the execution's lock, so the events of one execution stand in the order of its history.

-- log_key: a number as the key of an advisory lock: 16 bits that are ours, 48 bits of number.
create or replace function flowfabric.log_key(p_number bigint) returns bigint
language sql immutable as $$ select (7083::bigint << 48) | p_number $$;

-- open_log: to be called before events are written; answers the segment they go to.
create or replace function flowfabric.open_log(p_at timestamptz) returns smallint
language plpgsql as $$
begin
    perform pg_advisory_xact_lock_shared(flowfabric.log_key(n.last_value)) from flowfabric.event_number n;
    return flowfabric.event_slot(p_at);
end;
$$;

-- log_end: the number up to which the log is complete: nothing can appear below it any more.
--
-- The order of the two looks matters, and what is read with the answer must be read by a younger statement.
create or replace function flowfabric.log_end() returns bigint
language plpgsql volatile as $$
declare
    v_upto bigint;
    v_announced bigint;
begin
    select n.last_value into v_upto from flowfabric.event_number n;
    select min(((l.classid::bigint << 32) | l.objid::bigint) & ((1::bigint << 48) - 1)) into v_announced
    from pg_locks l
    where l.locktype = 'advisory' and l.objsubid = 1 and l.classid::bigint >> 16 = 7083
      and l.database = (select d.oid from pg_database d where d.datname = current_database());
    return least(v_upto, v_announced);
end;
$$;

-- read_events: committed events behind a number, in the one order, none missing
--
-- p_family is lease, completion, operator, signal or null for all.
-- Answers  the events, then one row with nothing but the number up to which the log was looked through, unless the page
--          is full.
create or replace function flowfabric.read_events(
    p_family text, p_after bigint, p_limit integer, p_namespace text, p_tag_key text, p_tag_value text)
returns table (seq bigint, occurred_at timestamptz, partition integer, id uuid, flow_id uuid, namespace text,
               tags jsonb, lease_type text, outcome text, operator_type text, signal_effect text, lease_id uuid,
               lease_epoch bigint, attempt_id uuid, attempt_index integer, worker_id text, worker_instance_id text, reason text,
               revoked_by text, details jsonb)
language plpgsql volatile security definer set search_path = flowfabric, pg_temp as $$
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
