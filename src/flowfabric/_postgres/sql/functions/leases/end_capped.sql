-- end_capped: fail executions whose lease was lost too often.
create or replace function flowfabric.end_capped(p_partition integer[], p_id uuid[], p_now timestamptz) returns void
language plpgsql as $$
begin
    perform flowfabric.end_executions(
        p_partition, p_id, null, 'failed', 'terminal_failed', null, null,
        array_fill('max_reclaims_exceeded'::text, array[cardinality(p_id)]),
        array_fill('infra_crash'::text, array[cardinality(p_id)]),
        null, null, 'max_reclaims_exceeded', 'reconciler', true, p_now);
end;
$$;

-- reclaim_cap: how many reclaims an execution may have: its policy's, else the caller's, else 1000.
create or replace function flowfabric.reclaim_cap(p_policy json, p_default bigint) returns bigint
language sql immutable as $$
    select case when p_policy is not null then coalesce((p_policy ->> 'max_reclaim_count')::bigint, 100)
                else coalesce(p_default, 1000) end
$$;
