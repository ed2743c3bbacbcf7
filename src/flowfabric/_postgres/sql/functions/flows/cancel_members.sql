-- cancel_members: cancel members of a cancelled flow that have to be, and acknowledge those that have ended
--
-- One chunk. A chunk that fails as a whole is repeated one by one; a member that fails alone stays in the backlog.
-- Takes    p_after: continue after this member.
-- Locks    the backlog of the flow, then the executions, by id; skips locked rows.
-- Returns  how many were acknowledged, which could not be, how many are left, the last member checked; busy: another
--          call is working on it.
-- Roles    work, operate
create or replace function flowfabric.cancel_members(
    p_partition integer, p_flow uuid, p_limit integer, p_after uuid)
returns table (handled integer, failed uuid[], message text, remaining integer, last uuid, busy boolean)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    b flowfabric.cancel_backlog;
    v_owed uuid[]; v_held uuid[];
    v_by text;
begin
    perform flowfabric.require_read_committed();
    handled := 0; failed := '{}'; busy := false;
    select x.* into b from flowfabric.cancel_backlog x where x.partition = p_partition and x.flow_id = p_flow
    for update skip locked;
    busy := b.flow_id is null and exists (
        select from flowfabric.cancel_backlog x where x.partition = p_partition and x.flow_id = p_flow);
    if b.flow_id is null then
        select count(*) into remaining from flowfabric.cancel_member m where m.partition = p_partition and m.flow_id = p_flow;
        return next;
        return;
    end if;
    select array_agg(m.id), max(m.id::text)::uuid into v_owed, last
    from (select x.id from flowfabric.cancel_member x where x.partition = p_partition and x.flow_id = p_flow
            and x.id > coalesce(p_after, flowfabric.zero_uuid())
          order by x.id limit p_limit) m;
    with held as materialized (   -- in the order of the ids
        select e.id from unnest(v_owed) u (id)
        cross join lateral (select x.id from flowfabric.execution x where x.partition = p_partition and x.id = u.id
                            offset 0 for no key update skip locked) e)
    select array_agg(h.id) into v_held from held h;
    -- Its own parent may have asked for it.
    v_by := case when exists (select from flowfabric.flow f where f.partition = p_partition and f.flow_id = p_flow
                              and f.parent_id::text = b.requester) then 'handler' else 'operator_override' end;
    v_now := flowfabric.now();
    begin
        perform flowfabric.end_members(p_partition, v_held, b.reason, v_by, v_now);
    exception
    when serialization_failure or deadlock_detected then
        raise;
    when others then
        for i in 1 .. cardinality(v_held) loop
            begin
                perform flowfabric.end_members(p_partition, v_held[i:i], b.reason, v_by, v_now);
            exception when others then
                failed := failed || v_held[i];
                message := sqlerrm;
            end;
        end loop;
    end;
    delete from flowfabric.cancel_member m using (
        select x.tid from unnest(v_owed) u (id)
        cross join lateral (
            select y.ctid as tid from flowfabric.cancel_member y where y.partition = p_partition and y.id = u.id
              and not exists (select from flowfabric.execution e
                              where e.partition = p_partition and e.id = u.id and e.completed_at is null) offset 0) x) done
    where m.ctid = done.tid;
    get diagnostics handled = row_count;
    select count(*) into remaining from (
        select from flowfabric.cancel_member m where m.partition = p_partition and m.flow_id = p_flow limit 10000) m;
    if remaining = 0 then
        delete from flowfabric.cancel_backlog x where x.partition = p_partition and x.flow_id = p_flow;
    end if;
    return next;
end;
$$;
