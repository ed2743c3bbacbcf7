-- time_out_attempts: end attempts that ran too long: schedule a retry, or fail.
create or replace function flowfabric.time_out_attempts(p_partition integer[], p_id uuid[], p_now timestamptz)
returns void
language plpgsql as $$
declare
    v_delay bigint[];
begin
    select array_agg(flowfabric.retry_delay_ms((e.policy ->> 'retry_policy')::jsonb, e.retries, 'timeout', 'timeout') order by u.ord)
    into v_delay
    from unnest(p_partition, p_id) with ordinality as u (partition, id, ord)
    join flowfabric.execution e on e.partition = u.partition and e.id = u.id;
    perform flowfabric.tell_holders(p_partition, p_id);
    perform flowfabric.schedule_retries(
        array_agg(u.partition), array_agg(u.id), array_agg('attempt_timeout'::text), array_agg('timeout'::text),
        array_agg(u.delay), 'expired:attempt_timeout', 'reconciler', p_now)
    from unnest(p_partition, p_id, v_delay) as u (partition, id, delay) where u.delay is not null having count(*) > 0;
    perform flowfabric.end_executions(
        array_agg(u.partition), array_agg(u.id), null, 'expired', 'expired', null, null,
        array_agg('attempt_timeout'::text), array_agg('timeout'::text), null, null,
        'expired:attempt_timeout', 'reconciler', false, p_now)
    from unnest(p_partition, p_id, v_delay) as u (partition, id, delay) where u.delay is null having count(*) > 0;
end;
$$;
