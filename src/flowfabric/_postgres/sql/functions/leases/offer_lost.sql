-- offer_lost: make executions whose lease was lost claimable.
create or replace function flowfabric.offer_lost(p_partition integer[], p_id uuid[]) returns void
language plpgsql as $$
declare
    v record;
begin
    for v in
        select case when e.lease_lost = 'expired' then e.lease_expires_at else e.lease_lost_at end + d.reclaim_grace as at,
               array_agg(e.partition) as partitions, array_agg(e.id) as ids
        from flowfabric.deployment d, unnest(p_partition, p_id) as u (partition, id)
        join flowfabric.execution e on e.partition = u.partition and e.id = u.id
        group by 1
    loop
        perform flowfabric.make_ready(v.partitions, v.ids, v.at);
    end loop;
end;
$$;
