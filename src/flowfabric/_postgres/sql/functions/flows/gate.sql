-- gate: hold back runnable executions whose flow does not let them run
--
-- Called under the locks of the executions. An execution marked to be cancelled is frozen, one with an unsatisfied
-- dependency is blocked. Their flows are marked to be counted again.
-- Returns  the others.
create or replace function flowfabric.gate(
    p_partition integer[], p_id uuid[], out partitions integer[], out ids uuid[])
language plpgsql as $$
declare
    v_partitions integer[]; v_ids uuid[]; v_owed boolean[]; v_details text[];
begin
    partitions := p_partition; ids := p_id;
    insert into flowfabric.flow_touched
    select distinct e.partition, e.flow_id from unnest(p_partition, p_id) as u (partition, id)
    join flowfabric.execution e on e.partition = u.partition and e.id = u.id where e.flow_id is not null;
    if not found then
        return;
    end if;
    select array_agg(e.partition), array_agg(e.id), array_agg(c.id is not null),
           array_agg(g.n - g.succeeded - g.failed - g.skipped || ' dep(s) unresolved')
    into v_partitions, v_ids, v_owed, v_details
    from unnest(p_partition, p_id) as u (partition, id)
    join flowfabric.execution e on e.partition = u.partition and e.id = u.id
    left join lateral (select x.id from flowfabric.cancel_member x
                       where x.partition = e.partition and x.id = e.id offset 0) c on true
    left join flowfabric.edge_group g on g.partition = e.partition and g.flow_id = e.flow_id and g.downstream = e.id
    where c.id is not null or (
        g.n > 0 and g.state = 'pending' and (e.state not in ('active', 'waiting_children') or e.is_parked));
    if v_ids is null then
        return;
    end if;
    perform flowfabric.freeze_members(array_agg(u.partition), array_agg(u.id), flowfabric.now())
    from unnest(v_partitions, v_ids, v_owed) as u (partition, id, owed) where u.owed having count(*) > 0;
    perform flowfabric.block_members(array_agg(u.partition), array_agg(u.id), array_agg(u.detail), flowfabric.now())
    from unnest(v_partitions, v_ids, v_owed, v_details) as u (partition, id, owed, detail)
    where not u.owed having count(*) > 0;
    select array_agg(u.partition), array_agg(u.id) into partitions, ids
    from unnest(p_partition, p_id) as u (partition, id) where u.id <> all (v_ids);
end;
$$;
