-- Siblings: upstreams that a decided join no longer needs, and their cancellation.

-- cancel_siblings: cancel one chunk of upstreams that a decided group no longer needs
--
-- Takes    p_limit: executions; null p_flow: the first entry in the queue that is not locked; else that group's. p_low_water:
--          no entry is left before it.
-- A chunk that fails as a whole is repeated one by one. A sibling that fails alone, or is locked, stays; an entry
-- without progress goes to the end of the queue.
-- Locks    the entry, then the group, then the executions, by id; skips locked rows.
-- Returns  the action (none, orphan, not_owed, busy, more, drained), and the states of the siblings.
-- Roles    work, operate
create or replace function flowfabric.cancel_siblings(
    p_partition integer, p_flow uuid, p_downstream uuid, p_limit integer, p_low_water timestamptz)
returns table (action text, partition integer, flow_id uuid, downstream uuid, reason text, cancelled integer,
               already_terminal integer, missing integer, failed integer, message text, enqueued_at timestamptz)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz := flowfabric.now();
    s flowfabric.sibling_cancel;
    g flowfabric.edge_group;
    v_chunk uuid[]; v_held uuid[]; v_live uuid[]; v_done uuid[];
    v_failed uuid[] := '{}';
begin
    perform flowfabric.require_read_committed();
    cancelled := 0; already_terminal := 0; missing := 0; failed := 0;
    if p_flow is null then
        select x.* into s from flowfabric.sibling_cancel x
        where x.due_at > coalesce(p_low_water, '-infinity') order by x.due_at limit 1
        for update skip locked;
    else
        select x.* into s from flowfabric.sibling_cancel x
        where x.partition = p_partition and x.flow_id = p_flow and x.downstream = p_downstream for update skip locked;
    end if;
    if s.flow_id is null then
        action := case when p_flow is not null and exists (
            select from flowfabric.sibling_cancel x
            where x.partition = p_partition and x.flow_id = p_flow and x.downstream = p_downstream) then 'busy' else 'none' end;
        return next;
        return;
    end if;
    partition := s.partition; flow_id := s.flow_id; downstream := s.downstream; enqueued_at := s.enqueued_at;
    select x.* into g from flowfabric.edge_group x
    where x.partition = s.partition and x.flow_id = s.flow_id and x.downstream = s.downstream for update skip locked;
    if g.flow_id is null and exists (select from flowfabric.edge_group x where x.partition = s.partition
            and x.flow_id = s.flow_id and x.downstream = s.downstream) then
        update flowfabric.sibling_cancel x set due_at = v_now
        where x.partition = s.partition and x.flow_id = s.flow_id and x.downstream = s.downstream;
        action := 'busy';
        return next;
        return;
    end if;
    reason := g.cancel_siblings_reason;
    action := case when g.flow_id is null then 'orphan' when not g.cancel_siblings_pending then 'not_owed' end;
    if action is null then
        v_chunk := s.siblings[:p_limit];
        with held as materialized (
            select e.id, e.ended from (select v.id from unnest(v_chunk) v (id) order by v.id) u
            cross join lateral (select x.id, x.completed_at is not null as ended from flowfabric.execution x
                                where x.partition = s.partition and x.id = u.id offset 0 for no key update skip locked) e)
        select array_agg(h.id), array_agg(h.id) filter (where not h.ended) into v_held, v_live from held h;
        v_now := flowfabric.now();
        begin
            perform flowfabric.end_members(s.partition, v_live, g.cancel_siblings_reason, 'operator_override', v_now);
        exception
        when serialization_failure or deadlock_detected then
            raise;
        when others then
            for i in 1 .. cardinality(v_live) loop
                begin
                    perform flowfabric.end_members(s.partition, v_live[i:i], g.cancel_siblings_reason, 'operator_override', v_now);
                exception when others then
                    v_failed := v_failed || v_live[i];
                    message := sqlerrm;
                end;
            end loop;
        end;
        failed := cardinality(v_failed);
        cancelled := coalesce(cardinality(v_live), 0) - failed;
        already_terminal := coalesce(cardinality(v_held), 0) - coalesce(cardinality(v_live), 0);
        select array_agg(u.id) into v_done from unnest(v_chunk) u (id)
        left join unnest(v_held) h (id) on h.id = u.id
        where (h.id is not null and h.id <> all (v_failed))
           or not exists (select from flowfabric.execution e where e.partition = s.partition and e.id = u.id);
        missing := coalesce(cardinality(v_done), 0) - cancelled - already_terminal;
        if coalesce(cardinality(v_done), 0) < cardinality(s.siblings) then
            -- Locked siblings go to the end of the list.
            update flowfabric.sibling_cancel x
            set siblings = s.siblings[p_limit + 1:]
                || (select coalesce(array_agg(u.id), '{}') from unnest(v_chunk) u (id) where u.id <> all (coalesce(v_done, '{}'))),
                due_at = v_now
            where x.partition = s.partition and x.flow_id = s.flow_id and x.downstream = s.downstream;
            action := case when v_done is null then 'busy' else 'more' end;
            return next;
            return;
        end if;
        update flowfabric.edge_group x set cancel_siblings_pending = false
        where x.partition = s.partition and x.flow_id = s.flow_id and x.downstream = s.downstream;
        action := 'drained';
    end if;
    delete from flowfabric.sibling_cancel x
    where x.partition = s.partition and x.flow_id = s.flow_id and x.downstream = s.downstream;
    return next;
end;
$$;
