-- audit_sample: the same for a few executions and flows of one partition, chosen at random
--
-- Called by the audit duty. Every rule here reaches its rows by key, so the cost depends on p_limit and not on what is
-- stored; rules about queues, timers and events need whole tables and are left to audit.
-- Takes    p_limit: how many executions at most.
-- Locks    nothing.
-- Returns  one row per violation.
-- Roles    work, operate
create or replace function flowfabric.audit_sample(p_partition integer, p_limit integer)
returns table (rule text, partition integer, id uuid, detail text)
language plpgsql volatile security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz := flowfabric.now();
    v_first uuid;
    v_last uuid;
    v_from uuid;
    v_to uuid;
begin
    select e.id into v_first from flowfabric.execution e where e.partition = p_partition order by e.id limit 1;
    select e.id into v_last from flowfabric.execution e where e.partition = p_partition order by e.id desc limit 1;
    if v_first is null then
        return;
    end if;
    -- Ids begin with the time they were made at: any moment between the first and the last.
    v_from := (lpad(to_hex(flowfabric.id_time(v_first)
                           + floor(random() * (flowfabric.id_time(v_last) - flowfabric.id_time(v_first) + 1))::bigint), 12, '0')
               || '00000000000000000000')::uuid;
    select x.id into v_to
    from (select e.id from flowfabric.execution e where e.partition = p_partition and e.id >= v_from
          order by e.id limit p_limit) x
    order by x.id desc limit 1;
    v_to := coalesce(v_to, 'ffffffff-ffff-ffff-ffff-ffffffffffff');
    return query select * from flowfabric.audit_by_key(p_partition, p_partition, v_from, v_to, v_now);
end;
$$;
