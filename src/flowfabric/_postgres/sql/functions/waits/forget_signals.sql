-- forget_signals: reset the waits of replayed executions: open waits start again, and so does a wait whose missing
-- signal ended the execution. Their waitpoints are closed; open_wait opens them again.
--
-- Called by replay, under its locks. A wait is reset like a failed step; its own timeout is deleted. Steps recorded after a
-- wait that ended without a signal belong to a branch that a later run need not take, and are marked as stray.
create or replace function flowfabric.forget_signals(p_partition integer[], p_id uuid[]) returns void
language plpgsql as $$
begin
    with forgotten as (
        update flowfabric.step s set error = '{"type": "NoSignal", "message": "replayed"}'
        from unnest(p_partition, p_id) as u (partition, id)
        join flowfabric.execution e on e.partition = u.partition and e.id = u.id
        where e.has_waitpoints and e.state <> 'completed' and s.partition = e.partition and s.id = e.id
          and s.generation = e.generation and s.kind = 'wait'
          and (s.outcome is null
               -- The last wait that ended without a signal is the one that failed the handler.
               or s.outcome in ('timed_out', 'operator_resumed') and e.failure_category in ('wait_timed_out', 'wait_overridden')
                  and s.recorded_at = (select max(x.recorded_at) from flowfabric.step x
                                       where x.partition = e.partition and x.id = e.id and x.generation = e.generation
                                         and x.kind = 'wait' and x.outcome in ('timed_out', 'operator_resumed')))
        returning s.partition, s.id, s.generation, s.name, s.n, s.outcome, s.recorded_at
    ), followed as (
        update flowfabric.step s set is_stray = true from forgotten f
        where f.outcome is not null and s.partition = f.partition and s.id = f.id and s.generation = f.generation
          and s.kind in ('step', 'submit') and s.recorded_at > f.recorded_at
    )
    delete from flowfabric.step s using forgotten f
    where s.partition = f.partition and s.id = f.id and s.generation = f.generation and s.kind = 'sleep'
      and s.name = 'timeout of wait ' || f.name || ' ' || f.n;
end;
$$;
