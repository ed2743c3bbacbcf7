-- submit_hooks: submit the tasks of hooks that are due, oldest first, with the facts as their payload
--
-- A hook has no hooks of its own. A task that cannot be submitted, because its lane is closed for example, is tried again a minute later.
-- Takes    p_low_water: no hook is left before it.
-- Locks    the rows, skipping locked ones; then as create_executions.
-- Returns  how many were submitted, how many were not, the last reason, and whether there may be more.
-- Roles    work, operate
create or replace function flowfabric.submit_hooks(p_limit integer, p_low_water timestamptz)
returns table (submitted integer, failed integer, message text, more boolean)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz := flowfabric.now();
    v_partitions integer := (select d.flow_partitions from flowfabric.deployment d);
    h flowfabric.hook;
    v_id uuid;
    v_code text;
    v_policy jsonb; v_budgets text; v_quotas text;
begin
    perform flowfabric.require_read_committed();
    submitted := 0; failed := 0;
    for h in
        select x.* from flowfabric.hook x
        where x.due_at > coalesce(p_low_water, '-infinity') and x.due_at <= v_now order by x.due_at, x.seq limit p_limit
        for update skip locked
    loop
        begin
            v_id := gen_random_uuid();
            v_policy := (h.spec ->> 'policy')::jsonb;
            v_budgets := ''; v_quotas := '';
            if v_policy is not null then
                v_budgets := concat_ws(',', (select string_agg(b.id, ',') from jsonb_array_elements_text(v_policy -> 'budget_ids') as b (id)),
                                       case when jsonb_typeof(v_policy -> 'budget') = 'object' then flowfabric.zero_uuid() end);
                v_quotas := concat_ws(',', (select string_agg(q.id, ',')
                                            from jsonb_array_elements_text(v_policy -> 'quota_policy_ids') as q (id)));
            end if;
            select c.code into v_code from flowfabric.create_executions(
                array[coalesce(h.spec ->> 'lane', 'default')], array[h.spec ->> 'kind'],
                array[coalesce(h.spec ->> 'capabilities', '')], null, array[flowfabric.partition_of(v_id, v_partitions)],
                array[v_id], false, array[coalesce(h.spec ->> 'namespace', '')], array['hook of ' || (h.facts ->> 'execution_id')],
                array[convert_to(h.facts::text, 'UTF8')], array['facts'], array[coalesce((h.spec ->> 'priority')::integer, 0)],
                null, null, null, array[h.spec ->> 'tags'], array[(v_policy - 'hooks')::text],
                case when v_budgets <> '' then array[v_budgets] end, case when v_quotas <> '' then array[v_quotas] end,
                null, array[(h.spec ->> 'delay_ms')::bigint], null, array[(h.spec ->> 'deadline_ms')::bigint]) c;
            if v_code <> 'created' then
                raise exception '% of %: %', h.spec ->> 'kind', h.facts ->> 'execution_id', v_code;
            end if;
            delete from flowfabric.hook x where x.seq = h.seq;
            submitted := submitted + 1;
        exception
        when serialization_failure or deadlock_detected then
            raise;
        when others then
            failed := failed + 1;
            message := sqlerrm;
            update flowfabric.hook x set due_at = v_now + interval '1 minute' where x.seq = h.seq;
        end;
    end loop;
    more := submitted + failed = p_limit;
    return next;
end;
$$;
