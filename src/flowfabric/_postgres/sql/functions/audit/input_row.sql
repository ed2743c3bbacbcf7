-- audit_input_row: Passed results belong to an edge, and the execution that receives them is marked.
create or replace function flowfabric.audit_input_row(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with d as (
        select x.* from flowfabric.edge x where (x.partition, x.flow_id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'input_row', i.partition, i.id, i.upstream::text from flowfabric.injected_input i
    where (i.partition, i.id) between (p_low, p_from) and (p_high, p_to)
      and not exists (select from flowfabric.execution e join flowfabric.edge x on x.partition = e.partition
                          and x.downstream = e.id and x.upstream = i.upstream and x.data_passing_ref is not null
                      where e.partition = i.partition and e.id = i.id and e.has_inputs)
    union all
    select 'input_row', d.partition, d.edge_id, d.downstream::text from d
    join flowfabric.execution e on e.partition = d.partition and e.id = d.downstream
    where d.passes and not e.has_inputs
$$;
