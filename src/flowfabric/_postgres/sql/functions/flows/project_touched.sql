-- project_touched: count the flows that changed since they were last counted; a bounded number of marks per call
--
-- Does not wait: a flow that another transaction has locked keeps its marks until a later call.
-- Returns  how many flows were counted, and whether there are more marks.
-- Roles    work, operate
create or replace function flowfabric.project_touched(p_limit integer) returns table (counted integer, more boolean)
language plpgsql security definer as $$
declare
    v_partitions integer[]; v_flows uuid[];
    v_n integer;
begin
    perform flowfabric.require_read_committed();
    -- The marks are deleted in a statement before the count: a later change leaves a new mark.
    with mark as materialized (
        select x.ctid as tid, x.partition, x.flow_id from flowfabric.flow_touched x limit p_limit for update skip locked
    ), held as materialized (
        select f.partition, f.flow_id
        from (select distinct m.partition, m.flow_id from mark m) w
        join flowfabric.flow f on f.partition = w.partition and f.flow_id = w.flow_id
        order by f.partition, f.flow_id for no key update of f skip locked
    ), taken as (
        delete from flowfabric.flow_touched t using mark m
        where t.ctid = m.tid
          and ((m.partition, m.flow_id) in (select h.partition, h.flow_id from held h)
               or not exists (select from flowfabric.flow f where f.partition = m.partition and f.flow_id = m.flow_id))
        returning t.partition, t.flow_id
    )
    select array_agg(d.partition), array_agg(d.flow_id), sum(d.n) into v_partitions, v_flows, v_n
    from (select t.partition, t.flow_id, count(*) as n from taken t group by 1, 2) d;
    counted := 0; more := coalesce(v_n, 0) >= p_limit;
    if v_flows is not null then
        counted := flowfabric.project_flows(v_partitions, v_flows);
    end if;
    return next;
end;
$$;
