-- audit_partition_of_id: An execution and a flow are stored in the partition that their id says.
create or replace function flowfabric.audit_partition_of_id(p_low integer, p_high integer)
returns setof flowfabric.violation
language sql stable as $$
    select 'partition_of_id', e.partition, e.id, null::text
    from flowfabric.execution e cross join flowfabric.deployment d
    where e.partition between p_low and p_high and e.partition <> flowfabric.partition_of(e.id, d.flow_partitions)
    union all
    select 'partition_of_id', f.partition, f.flow_id, 'flow'
    from flowfabric.flow f cross join flowfabric.deployment d
    where f.partition between p_low and p_high and f.partition <> flowfabric.partition_of(f.flow_id, d.flow_partitions)
$$;
