-- cascade_ended: resolve the edges of ended executions, as far as possible without waiting.
--
-- Called by end_executions for members of flows. Resolves one hop, and never waits; the rest, and everything after
-- skipped edges, is left to the dispatcher.
create or replace function flowfabric.cascade_ended(
    p_partition integer[], p_id uuid[], p_flow uuid[], p_run integer[], p_event bigint[], p_state text, p_now timestamptz)
returns void
language plpgsql as $$
declare
    v_done boolean[];
begin
    insert into flowfabric.flow_touched
    select distinct u.partition, u.flow from unnest(p_partition, p_flow) as u (partition, flow);
    -- A snapshot older than the locks may miss an applied edge: then the dispatcher resolves it.
    if p_state <> 'skipped' and current_setting('transaction_isolation') = 'read committed' then
        select c.done into v_done
        from flowfabric.cascade(
            p_partition, p_id, p_run, array_fill(flowfabric.outcome_of(p_state), array[cardinality(p_id)]), p_event,
            array_fill(null::uuid, array[cardinality(p_id)]), greatest(500, cardinality(p_id)), p_now) c;
        if false <> all (v_done) then
            return;
        end if;
    end if;
    insert into flowfabric.pending_cascade (seq, partition, id, flow_id, run, outcome, enqueued_at)
    select u.event, u.partition, u.id, u.flow, u.run, flowfabric.outcome_of(p_state), p_now
    from unnest(p_event, p_partition, p_id, p_flow, p_run, v_done) as u (event, partition, id, flow, run, done)
    where u.done is not true
      and (v_done is not null or current_setting('transaction_isolation') <> 'read committed' or exists (
          select from flowfabric.edge d where d.partition = u.partition and d.upstream = u.id and d.applied_at is not null
            and d.outcome is null and d.from_run <= u.run));
    if found then
        perform flowfabric.wake_duties(p_now);
    end if;
end;
$$;
