-- Children: what the handler of an execution submitted, and its cancellation with that execution.

-- cancel_children: cancel one chunk of what a cancelled or expired execution submitted
--
-- Called by the process that cancelled the parent, and by a duty. One call takes one parent: a chunk of its executions,
-- then one flow at a time, whose members the duty for flows cancels. If a flow was closed before, and members live on
-- (they were spared, or replayed since), a call takes a chunk of them. Children that are locked, or that fail, are read
-- again at the end.
-- Takes    p_partition: only parents of this partition that were cancelled in the last minute; null: all. p_limit: executions.
--          p_low_water: no parent is left before it.
-- Locks    the entry, then the executions, skipping locked rows; or the entry, then as cancel_flow_header; or the entry, the
--          flow, then members, skipping locked rows.
-- Returns  the parent (null: there is none, or all are locked), how many children were cancelled, how many could not be,
--          whether there is more to do now.
-- Roles    work, operate
create or replace function flowfabric.cancel_children(
    p_partition integer, p_limit integer, p_low_water timestamptz)
returns table (parent uuid, cancelled integer, failed integer, message text, more boolean)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz := flowfabric.now();
    v_low_water timestamptz := coalesce(p_low_water, case when p_partition is not null then v_now - interval '1 minute' end,
                                        '-infinity');
    c flowfabric.child_cancel;
    v_reason text;
    v_seen integer; v_live integer := 0;
    v_held uuid[];
    f flowfabric.flow;
    v_state text;
begin
    perform flowfabric.require_read_committed();
    cancelled := 0; failed := 0; more := false;
    select x.* into c from flowfabric.child_cancel x
    where x.due_at > v_low_water and (p_partition is null or x.partition = p_partition)
    order by x.due_at limit 1 for update skip locked;
    if c.id is null then
        return next;
        return;
    end if;
    parent := c.id;
    v_reason := 'parent ' || c.id || ' was '
        || coalesce((select e.state from flowfabric.execution e where e.partition = c.partition and e.id = c.id), 'cancelled');
    if not c.at_flows then
        with seen as materialized (
            select x.id, x.created_at, x.completed_at is null as live from flowfabric.execution x
            where x.parent_id = c.id
              and (x.created_at, x.id) > (coalesce(c.after_at, '-infinity'), coalesce(c.after_id, flowfabric.zero_uuid()))
            order by x.created_at, x.id limit p_limit
        ), held as materialized (
            select e.id from seen s
            cross join lateral (select x.id from flowfabric.execution x where x.partition = c.partition and x.id = s.id
                                and x.completed_at is null offset 0 for no key update skip locked) e
            where s.live
        )
        select count(*), count(*) filter (where s.live), max(s.created_at), (array_agg(s.id order by s.created_at desc, s.id desc))[1],
               (select array_agg(h.id) from held h)
        into v_seen, v_live, c.after_at, c.after_id, v_held
        from seen s;
        v_now := flowfabric.now();
        if v_held is not null then
            select x.failed, x.message into failed, message
            from flowfabric.end_children(c.partition, v_held, v_reason, v_now) x;
            cancelled := cardinality(v_held) - failed;
        end if;
        -- One that ended between the statements is read once more, which does no harm.
        c.has_missed := c.has_missed or cancelled < v_live;
        more := v_seen = p_limit;
        c.at_flows := not more;
        if c.at_flows then
            c.after_at := null; c.after_id := null;
            more := exists (select from flowfabric.flow x where x.parent_id = c.id);
        end if;
    else
        -- Alone in its call: closing a flow waits for its members, so no other execution may be locked.
        select x.* into f from flowfabric.flow x where x.parent_id = c.id
          and (x.created_at, x.flow_id) > (coalesce(c.after_at, '-infinity'), coalesce(c.after_id, flowfabric.zero_uuid()))
        order by x.created_at, x.flow_id limit 1;
        if f.flow_id is not null then
            more := true;
            if exists (select from flowfabric.execution m where m.flow_id = f.flow_id and m.completed_at is null) then
                select x.state into v_state from flowfabric.flow x
                where x.partition = f.partition and x.flow_id = f.flow_id for no key update;
                if v_state = 'open' then
                    -- A flow whose last member ends meanwhile has finished, and stays open.
                    perform flowfabric.lock_members(f.partition, array(
                        select m.id from flowfabric.execution m where m.flow_id = f.flow_id and m.completed_at is null));
                    if exists (select from flowfabric.execution m where m.flow_id = f.flow_id and m.completed_at is null) then
                        perform flowfabric.cancel_flow_header(f.partition, f.flow_id, v_reason, 'cancel_all', 0, 'parent');
                        cancelled := 1;
                    end if;
                else
                    with live as materialized (
                        select m.id from flowfabric.execution m
                        where m.flow_id = f.flow_id and m.completed_at is null and not exists (
                            select from flowfabric.cancel_member o where o.partition = m.partition and o.id = m.id)
                    ), held as materialized (
                        select e.id from (select l.id from live l order by l.id) s
                        cross join lateral (select x.id from flowfabric.execution x where x.partition = f.partition and x.id = s.id
                                            and x.completed_at is null offset 0 for no key update skip locked) e
                        limit p_limit
                    )
                    select (select count(*) from live l), array_agg(h.id) into v_live, v_held from held h;
                    if v_held is not null then
                        select x.failed, x.message into failed, message
                        from flowfabric.end_children(f.partition, v_held, v_reason, flowfabric.now()) x;
                        cancelled := cardinality(v_held) - failed;
                    end if;
                end if;
            end if;
            if cancelled = 0 or cancelled >= v_live then   -- else the same flow once more
                c.has_missed := c.has_missed or cancelled < v_live;
                c.after_at := f.created_at; c.after_id := f.flow_id;
            end if;
        end if;
        v_now := flowfabric.now();
    end if;
    if more or c.has_missed then
        if not more then   -- from the beginning
            c.at_flows := false; c.after_at := null; c.after_id := null; c.has_missed := false;
        end if;
        update flowfabric.child_cancel x
        set due_at = v_now, at_flows = c.at_flows, after_at = c.after_at, after_id = c.after_id, has_missed = c.has_missed
        where x.partition = c.partition and x.id = c.id;
        -- A locked child holds up no other parent, except those that were tried just now.
        more := more or exists (select from flowfabric.child_cancel x
                                where x.due_at > v_low_water and x.due_at < v_now - interval '200 milliseconds'
                                and (p_partition is null or x.partition = p_partition));
    else
        delete from flowfabric.child_cancel x where x.partition = c.partition and x.id = c.id;
        more := exists (select from flowfabric.child_cancel x
                        where x.due_at > v_low_water and (p_partition is null or x.partition = p_partition));
    end if;
    return next;
end;
$$;

-- end_children: cancel children, which the caller has locked and which have not ended
--
-- Those that cannot be cancelled together are cancelled one by one.
-- Returns  how many could not be, and why.
create or replace function flowfabric.end_children(
    p_partition integer, p_id uuid[], p_reason text, p_now timestamptz, out failed integer, out message text)
language plpgsql as $$
begin
    failed := 0;
    begin
        perform flowfabric.end_with_parent(p_partition, p_id, p_reason, p_now);
    exception
    when serialization_failure or deadlock_detected then
        raise;
    when others then
        for i in 1 .. cardinality(p_id) loop
            begin
                perform flowfabric.end_with_parent(p_partition, p_id[i:i], p_reason, p_now);
            exception when others then
                failed := failed + 1;
                message := sqlerrm;
            end;
        end loop;
    end;
end;
$$;

-- end_with_parent: cancel children together, or none of them.
create or replace function flowfabric.end_with_parent(p_partition integer, p_id uuid[], p_reason text, p_now timestamptz)
returns void
language sql volatile as $$
    select flowfabric.end_executions(
        array_fill(p_partition, array[cardinality(p_id)]), p_id, null, 'cancelled', 'cancelled', null, null, null, null,
        p_reason, 'parent', 'cancelled', 'backend', false, p_now)
$$;
