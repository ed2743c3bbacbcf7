-- skip_members: anything that has not ended -> skipped, because a dependency cannot be satisfied any more.
--
-- Called under the locks of the executions. Those marked to be cancelled are cancelled instead.
create or replace function flowfabric.skip_members(p_partition integer[], p_id uuid[], p_now timestamptz) returns void
language plpgsql as $$
begin
    perform set_config('flowfabric.ended', 'yes', true);   -- the dispatcher commits it synchronously
    perform flowfabric.end_executions(
        array_agg(e.partition), array_agg(e.id), null, 'skipped', 'skipped', null, null, null, null,
        null, null, 'dependency_impossible', 'reconciler', false, p_now)
    from unnest(p_partition, p_id) as u (partition, id)
    join flowfabric.execution e on e.partition = u.partition and e.id = u.id and e.completed_at is null
    where not exists (select from flowfabric.cancel_member c where c.partition = e.partition and c.id = e.id)
    having count(*) > 0;
end;
$$;
