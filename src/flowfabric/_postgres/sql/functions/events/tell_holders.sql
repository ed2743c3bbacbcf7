-- tell_holders: notify the workers whose leases were revoked, once per worker.
create or replace function flowfabric.tell_holders(p_partition integer[], p_id uuid[]) returns void
language sql volatile as $$
    select pg_notify('flowfabric', 'lost ' || d.worker_instance_id)
    from (select distinct w.worker_instance_id from unnest(p_partition, p_id) as u (partition, id)
          join flowfabric.execution e on e.partition = u.partition and e.id = u.id
          join flowfabric.worker w on w.id = e.worker
          where e.state = 'active') d
$$;
