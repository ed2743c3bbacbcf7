-- audit_partition_of_id: An execution and a flow are stored in the partition that their id says.
create or replace function flowfabric.audit_partition_of_id(
    p_low integer, p_high integer, p_from uuid, p_to uuid)
returns setof flowfabric.violation
language sql stable as $$
    select 'partition_of_id', e.partition, e.id, null::text
    from flowfabric.execution e cross join flowfabric.deployment d
    where (e.partition, e.id) between (p_low, p_from) and (p_high, p_to) and e.partition <> flowfabric.partition_of(e.id, d.flow_partitions)
    union all
    select 'partition_of_id', f.partition, f.flow_id, 'flow'
    from flowfabric.flow f cross join flowfabric.deployment d
    where (f.partition, f.flow_id) between (p_low, p_from) and (p_high, p_to) and f.partition <> flowfabric.partition_of(f.flow_id, d.flow_partitions)
$$;
