-- pass_deadlines: expire executions that took too long in total, in any state.
create or replace function flowfabric.pass_deadlines(p_partition integer[], p_id uuid[], p_now timestamptz)
returns void
language plpgsql as $$
begin
    perform flowfabric.end_executions(
        p_partition, p_id, null, 'expired', 'expired', null, null,
        array_fill('execution_deadline'::text, array[cardinality(p_id)]),
        array_fill('timeout'::text, array[cardinality(p_id)]),
        null, null, 'expired:execution_deadline', 'reconciler', false, p_now);
end;
$$;
