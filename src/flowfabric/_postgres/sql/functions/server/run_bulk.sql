-- run_bulk: run the next chunk of a bulk job, and record how far it is: one transaction
--
-- Called by the duty bulk_work in any number of processes.
-- Locks    the job, skipping it if another process runs a chunk; then the executions, as cancel and replay do.
-- Returns  the state of the job afterwards and how many executions the chunk was about; null if another process runs it
--          or it does not run any more.
-- Roles    work, operate
create or replace function flowfabric.run_bulk(p_id uuid, p_limit integer, p_budget integer)
returns table (state text, handled integer)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    j flowfabric.bulk_job;
    v_partitions integer[]; v_ids uuid[];
    v_at timestamptz; v_id uuid; v_partition integer;   -- where the next chunk continues; null: this is the last
    v_n integer;
    v_changed integer := 0; v_unchanged integer := 0; v_refused integer := 0;
    v_refusals jsonb;
begin
    perform flowfabric.require_read_committed();
    select b.* into j from flowfabric.bulk_job b where b.id = p_id and b.state = 'running' for update skip locked;
    if not found then
        return next;
        return;
    end if;
    perform set_config('flowfabric.actor', j.actor, true);
    select coalesce(array_agg(f.partition) filter (where f.state is not null), '{}'),
           coalesce(array_agg(f.id) filter (where f.state is not null), '{}'),
           max(f.created_at) filter (where f.state is null), (array_agg(f.id) filter (where f.state is null))[1],
           max(f.partition) filter (where f.state is null)
    into v_partitions, v_ids, v_at, v_id, v_partition
    from flowfabric.find(j.namespace, j.lanes, j.kinds, j.states, j.tag_key, j.tag_value, j.flow_id, j.created_from,
                         j.created_before, j.after_at, j.after_id, j.after_partition, p_limit, p_budget, j.parent_id,
                         false, false) f;
    v_n := cardinality(v_ids);
    if v_n > 0 then
        with verdict as materialized (
            select v.ordinal, v.code, v.detail
            from flowfabric.cancel_as_operator(
                v_partitions, v_ids, array_fill(null::uuid, array[v_n]), array_fill(null::bigint, array[v_n]),
                array_fill(null::uuid, array[v_n]), array_fill(null::integer, array[v_n]), 'operator_override',
                coalesce(j.reason, ''), false) v
            where j.operation = 'cancel'
            union all
            select v.ordinal, v.code, v.detail from flowfabric.replay(v_partitions, v_ids, j.reason, j.actor) v
            where j.operation = 'replay'
        )
        select count(*) filter (where v.code = 'ok' and v.detail is distinct from 'already'),
               count(*) filter (where v.code = 'ok' and v.detail = 'already'), count(*) filter (where v.code <> 'ok'),
               jsonb_agg(jsonb_build_object('execution_id', v_ids[v.ordinal], 'code', v.code) order by v.ordinal)
                   filter (where v.code <> 'ok')
        into v_changed, v_unchanged, v_refused, v_refusals
        from verdict v;
    end if;
    update flowfabric.bulk_job b
    set state = case when v_at is null then 'done' else 'running' end,
        ended_at = case when v_at is null then flowfabric.now() end,
        after_at = v_at, after_id = v_id, after_partition = v_partition,
        changed = b.changed + v_changed, unchanged = b.unchanged + v_unchanged, refused = b.refused + v_refused,
        refusals = case when v_refusals is null or jsonb_array_length(b.refusals) >= 20 then b.refusals
                        else jsonb_path_query_array(b.refusals || v_refusals, '$[0 to 19]') end
    where b.id = p_id
    returning b.state into state;
    handled := v_n;
    return next;
end;
$$;
