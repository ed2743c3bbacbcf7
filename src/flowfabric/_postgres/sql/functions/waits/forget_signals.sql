-- forget_signals: executions that ended are replayed: what they still waited for they wait for anew, and so for a signal
-- whose absence was their end. Their waitpoints are closed.
--
-- Called by replay, under its locks. A wait is forgotten as a failed step is, a time limit of its own altogether.
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
               -- Of those that ended without a signal the last one is what the handler failed of.
               or s.outcome in ('timed_out', 'operator_resumed') and e.failure_category in ('wait_timed_out', 'wait_overridden')
                  and s.recorded_at = (select max(x.recorded_at) from flowfabric.step x
                                       where x.partition = e.partition and x.id = e.id and x.generation = e.generation
                                         and x.kind = 'wait' and x.outcome in ('timed_out', 'operator_resumed')))
        returning s.partition, s.id, s.generation, s.name, s.n
    )
    delete from flowfabric.step s using forgotten f
    where s.partition = f.partition and s.id = f.id and s.generation = f.generation and s.kind = 'sleep'
      and s.name = 'timeout of wait ' || f.name || ' ' || f.n;
end;
$$;
