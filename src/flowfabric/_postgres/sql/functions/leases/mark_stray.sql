-- mark_stray: mark the steps that executions recorded under their present lease, because changed code ran them
--
-- Called under the locks of the executions, by stop_changed and by fail with the category steps_changed. The steps stay: code
-- that asks for one of them gets its result. Code that does not, such as the code before the change, is not changed code. A
-- wait that was opened before is not theirs, even if it ended meanwhile. The branch that a patch took is forgotten.
create or replace function flowfabric.mark_stray(p_partition integer[], p_id uuid[]) returns void
language plpgsql as $$
begin
    delete from flowfabric.step s using unnest(p_partition, p_id) as u (partition, id), flowfabric.execution e
    where e.partition = u.partition and e.id = u.id
      and s.partition = e.partition and s.id = e.id and s.generation = e.generation and s.kind = 'patch'
      and s.recorded_at >= coalesce(e.attempt_resumed_at, e.attempt_started_at);
    update flowfabric.step s set is_stray = true
    from unnest(p_partition, p_id) as u (partition, id), flowfabric.execution e
    where e.partition = u.partition and e.id = u.id
      and s.partition = e.partition and s.id = e.id and s.generation = e.generation
      and s.recorded_at >= coalesce(e.attempt_resumed_at, e.attempt_started_at)
      and (s.kind <> 'wait' or exists (select from flowfabric.waitpoint w
                                       where w.waitpoint_id = s.waitpoint_ids[1]
                                         and w.created_at >= coalesce(e.attempt_resumed_at, e.attempt_started_at)));
end;
$$;
