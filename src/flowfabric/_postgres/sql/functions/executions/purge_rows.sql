-- purge_rows: delete ended executions and everything they own. Events and idempotency records have their own retention.
create or replace function flowfabric.purge_rows(p_partition integer[], p_id uuid[]) returns void
language plpgsql as $$
begin
    delete from flowfabric.injected_input i using unnest(p_partition, p_id) as u (partition, id)
    where i.partition = u.partition and i.id = u.id;
    delete from flowfabric.attempt a using unnest(p_partition, p_id) as u (partition, id)
    where a.partition = u.partition and a.id = u.id;
    delete from flowfabric.step s using unnest(p_partition, p_id) as u (partition, id)
    where s.partition = u.partition and s.id = u.id;
    if exists (select from unnest(p_partition, p_id) as u (partition, id)
               join flowfabric.execution e on e.partition = u.partition and e.id = u.id where e.has_waitpoints) then
        delete from flowfabric.signal s using unnest(p_partition, p_id) as u (partition, id)
        where s.partition = u.partition and s.id = u.id;
        delete from flowfabric.suspension s using unnest(p_partition, p_id) as u (partition, id)
        where s.partition = u.partition and s.id = u.id;
        delete from flowfabric.waitpoint w using unnest(p_partition, p_id) as u (partition, id)
        where w.partition = u.partition and w.id = u.id;
    end if;
    delete from flowfabric.tag t
    using (select e.partition, e.id, e.created_at, flowfabric.tag_digest(k.key, k.value) as digest
           from unnest(p_partition, p_id) as u (partition, id)
           join flowfabric.execution e on e.partition = u.partition and e.id = u.id
           cross join lateral jsonb_each_text(e.tags) as k (key, value)) g
    where t.digest = g.digest and t.created_at = g.created_at and t.id = g.id and t.partition = g.partition;
    delete from flowfabric.unsuccessful w
    using unnest(p_partition, p_id) as u (partition, id)
    join flowfabric.execution e on e.partition = u.partition and e.id = u.id
    where w.state = e.state and w.created_at = e.created_at and w.id = e.id and w.partition = e.partition;
    delete from flowfabric.execution e using unnest(p_partition, p_id) as u (partition, id)
    where e.partition = u.partition and e.id = u.id;
end;
$$;
