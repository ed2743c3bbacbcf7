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
    cross join lateral (select x.partition, x.id from flowfabric.execution x
                        where x.partition = u.partition and x.id = u.id and x.completed_at is null offset 0) e
    left join lateral (select true as is_owed from flowfabric.cancel_member c
                       where c.partition = u.partition and c.id = u.id offset 0) c on true
    where c.is_owed is null
    having count(*) > 0;
end;
$$;
