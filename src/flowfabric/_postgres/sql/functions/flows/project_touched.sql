-- project_touched: count the flows that changed since they were last counted; a bounded number of marks per call
--
-- Returns  how many flows were counted, and whether there are more marks.
-- Roles    work, operate
create or replace function flowfabric.project_touched(p_limit integer) returns table (counted integer, more boolean)
language plpgsql security definer as $$
declare
    v_partitions integer[]; v_flows uuid[];
    v_n integer;
begin
    perform flowfabric.require_read_committed();
    if not pg_try_advisory_xact_lock(708304, 0) then
        counted := 0; more := false;   -- another call is counting
        return next;
        return;
    end if;
    -- The marks are deleted in a statement before the count: a later change leaves a new mark.
    with taken as (
        delete from flowfabric.flow_touched t using (
            select x.ctid as tid from flowfabric.flow_touched x limit p_limit for update skip locked) old
        where t.ctid = old.tid returning t.partition, t.flow_id
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
