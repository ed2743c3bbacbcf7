-- audit_child_partition: A child is in the partition of its parent, and not its own parent. A flow with an idempotency key
-- may be in another partition.
create or replace function flowfabric.audit_child_partition(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    select 'child_partition', e.partition, e.id, e.parent_id::text
    from flowfabric.execution e cross join flowfabric.deployment d
    where (e.partition, e.id) between (p_low, p_from) and (p_high, p_to) and e.parent_id is not null
      and (flowfabric.partition_of(e.parent_id, d.flow_partitions) <> e.partition or e.parent_id = e.id)
$$;
