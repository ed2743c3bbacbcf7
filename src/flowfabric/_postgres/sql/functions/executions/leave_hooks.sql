-- leave_hooks: leave a row for each task that a policy names for such a moment: failure or escalation
--
-- Called under the locks of the executions, in the transaction that ends or escalates them. A duty submits the tasks:
-- here it could wait for a lane or a kind that another transaction registers.
create or replace function flowfabric.leave_hooks(
    p_partition integer[], p_id uuid[], p_what text, p_facts jsonb, p_now timestamptz) returns void
language plpgsql as $$
begin
    insert into flowfabric.hook (spec, facts, due_at)
    select e.policy -> 'hooks' -> p_what,
           jsonb_build_object('type', p_what, 'execution_id', e.id, 'kind', r.kind, 'lane', r.lane, 'namespace', e.namespace,
                              'flow_id', e.flow_id, 'tags', coalesce(e.tags, '{}'), 'attempt', e.attempts, 'at', p_now)
           || p_facts
           || case p_what when 'failure' then jsonb_build_object(
                  'state', e.state, 'reason', e.failure_reason, 'category', e.failure_category) else '{}' end, p_now
    from unnest(p_partition, p_id) as u (partition, id)
    join flowfabric.execution e on e.partition = u.partition and e.id = u.id
    join flowfabric.route r on r.id = e.route
    where json_typeof(e.policy -> 'hooks' -> p_what) = 'object';
    if found then
        perform flowfabric.wake_duties(p_now);
    end if;
end;
$$;
