-- fail: active -> delayed (another attempt follows) or failed, for many in one call
--
-- Called by the worker that holds the leases.
-- Takes    per item the reason, its class and category, and optionally a retry policy instead of the frozen one.
-- Locks    the executions, by partition and id.
-- Returns  one verdict per item: ok with detail 'retry_scheduled N M' (the Nth of at most M retries, at = when) or
--          terminal_failed; replayed; or a refusal.
-- Roles    work, operate
create or replace function flowfabric.fail(
    p_partition integer[], p_id uuid[], p_lease uuid[], p_epoch bigint[], p_attempt uuid[], p_index integer[],
    p_reason text[], p_class text[], p_category text[], p_retry_policy text[])
returns setof flowfabric.verdict
language plpgsql security definer as $$
declare
    v_now timestamptz;
    v_ok integer[];
    v_tids tid[];
    v_delay bigint[];        -- per ordinal: null means final
begin
    perform flowfabric.require_read_committed();
    select l.at, l.ok, l.tids into v_now, v_ok, v_tids
    from flowfabric.lock_holders(p_partition, p_id, p_lease, p_epoch, p_attempt, p_index) l;
    -- An item given twice is handled once.
    select coalesce(array_agg(d.o), '{}'), coalesce(array_agg(d.t), '{}') into v_ok, v_tids
    from (select min(h.o) as o, h.t from unnest(v_ok, v_tids) as h (o, t) group by h.t) d;

    if 'steps_changed' = any (p_category) then
        perform flowfabric.mark_stray(array_agg(p_partition[o]), array_agg(p_id[o]))
        from unnest(v_ok) as u (o) where p_category[o] = 'steps_changed';
    end if;
    select array_agg(flowfabric.retry_delay_ms(
                         coalesce(p_retry_policy[o], e.policy ->> 'retry_policy')::jsonb, e.retries, p_class[o],
                         p_category[o]) order by i)
    into v_delay
    from unnest(v_ok) with ordinality as u (o, i)
    join flowfabric.execution e on e.partition = p_partition[o] and e.id = p_id[o];

    perform flowfabric.schedule_retries(
        array_agg(p_partition[o]), array_agg(p_id[o]), array_agg(p_reason[o]), array_agg(p_category[o]),
        array_agg(d), 'failed_retry_scheduled', 'backend', v_now)
    from unnest(v_ok, v_delay) as u (o, d) where d is not null having count(*) > 0;
    perform flowfabric.end_executions(
        array_agg(p_partition[o]), array_agg(p_id[o]), array_agg(t), 'failed', 'terminal_failed',
        null, null, array_agg(p_reason[o]), array_agg(p_category[o]),
        null, null, 'failed_terminal', 'backend', true, v_now)
    from unnest(v_ok, v_delay, v_tids) as u (o, d, t) where d is null having count(*) > 0;

    return query
    select o, 'ok',
           case when d is null then 'terminal_failed'
                else format('retry_scheduled %s %s', e.retries,
                            coalesce((coalesce(p_retry_policy[o], e.policy ->> 'retry_policy')::jsonb
                                      ->> 'max_retries')::bigint, 3)) end,
           case when d is null then 'failed' else 'delayed' end, e.attempts::bigint, null::uuid, e.retry_at
    from unnest(v_ok, v_delay) as u (o, d)
    join flowfabric.execution e on e.partition = p_partition[o] and e.id = p_id[o];
    if cardinality(v_ok) < cardinality(p_id) then
        return query select * from flowfabric.refuse_holders(
            p_partition, p_id, p_lease, p_epoch, p_attempt, p_index, 'failed', v_ok, v_now);
    end if;
end;
$$;
