-- enqueue_children: executions were cancelled or expired; leave a row for those that submitted others.
--
-- Called by end_executions, under its locks. A submission holds the lock of the parent, so that none comes later.
create or replace function flowfabric.enqueue_children(p_partition integer[], p_id uuid[], p_now timestamptz) returns void
language plpgsql as $$
begin
    insert into flowfabric.child_cancel (partition, id, enqueued_at, due_at)
    select e.partition, e.id, p_now, p_now from unnest(p_partition, p_id) as u (partition, id)
    join flowfabric.execution e on e.partition = u.partition and e.id = u.id
    where e.keeps_children is not true and flowfabric.has_children(e.id)
    on conflict do nothing;
    if found then
        perform flowfabric.wake_duties(p_now);
    end if;
end;
$$;

-- has_children: whether the handler of an execution ever submitted another one that is still stored.
create or replace function flowfabric.has_children(p_id uuid) returns boolean
language sql stable as $$
    select exists (select from flowfabric.execution e where e.parent_id = p_id)
        or exists (select from flowfabric.flow f where f.parent_id = p_id)
$$;
