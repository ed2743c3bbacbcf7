-- renew_children: executions are replayed; their handlers submit cancelled children again and keep the others.
--
-- A child whose result is recorded is kept, and so is one that the handler cancelled itself. A flow counts as cancelled if
-- it was closed and one of its members was cancelled, other than as the loser of a race: a flow can be closed after its
-- members finished, or be replayed since.
-- Called by replay, under its locks, before the state changes. Children that were still to be cancelled stay alive, except members
-- of a flow that was closed: they are cancelled now, so that none completes beside its successor. Everything recorded
-- after a child that is submitted again is marked as stray: the handler asks for the child first.
create or replace function flowfabric.renew_children(p_partition integer[], p_id uuid[]) returns void
language plpgsql as $$
declare
    v_partitions integer[];
    v_ids uuid[];
    v_since timestamptz[];   -- when the first of the children that are submitted again was recorded
    b flowfabric.cancel_backlog;
begin
    delete from flowfabric.child_cancel c where c.ctid = any (array(
        select f.tid from unnest(p_partition, p_id) as u (partition, id)
        cross join lateral (select x.ctid as tid from flowfabric.child_cancel x
                            where x.partition = u.partition and x.id = u.id offset 0) f));
    for b in
        select x.* from unnest(p_id) as u (id)
        join flowfabric.flow f on f.parent_id = u.id and f.state = 'cancelled'
        join flowfabric.cancel_backlog x on x.partition = f.partition and x.flow_id = f.flow_id
        order by x.partition, x.flow_id
    loop
        perform flowfabric.finish_cancel(b.partition, b.flow_id);
    end loop;
    with forgotten as (
        delete from flowfabric.step s using (
            select x.tid, k.namespace, k.idempotency_key as key, k.id
            from unnest(p_partition, p_id) as u (partition, id)
            join flowfabric.execution p on p.partition = u.partition and p.id = u.id
            cross join flowfabric.deployment d
            cross join lateral (select y.ctid as tid, y.* from flowfabric.step y
                                where y.partition = p.partition and y.id = p.id and y.generation = p.generation
                                  and y.kind = 'submit' offset 0) x
            left join lateral (select e.id, e.namespace, e.idempotency_key, e.parent_id, e.state, e.cancelled_by from flowfabric.execution e
                               where e.partition = x.child_partition and e.id = x.child_id offset 0) k on true
            left join lateral (select f.flow_id, f.parent_id, f.state from flowfabric.flow f
                               where f.partition = flowfabric.partition_of(x.flow_id, d.flow_partitions)
                                 and f.flow_id = x.flow_id offset 0) g on true
            where k.parent_id = x.id and k.state = 'cancelled' and k.cancelled_by is distinct from 'handler'
                  and (flowfabric.needed_by(x.id, flowfabric.result_step(k.id))).id is not null
               or g.parent_id = x.id and g.state = 'cancelled' and flowfabric.was_stopped(g.flow_id)
                  and (flowfabric.needed_by(x.id, flowfabric.flow_result_step(g.flow_id))).id is not null) old
        where s.ctid = old.tid
        returning old.id, old.namespace, old.key, s.partition, s.id as parent_id, s.recorded_at
    ), freed as (
        -- The key of a cancelled child is free again, so that its successor can have it.
        delete from flowfabric.idempotency i using (
            select n.tid from forgotten e
            cross join lateral (select x.ctid as tid from flowfabric.idempotency x
                                where x.scope = flowfabric.zero_uuid() and x.namespace = e.namespace and x.key = e.key
                                  and x.id = e.id offset 0) n) taken
        where i.ctid = taken.tid
    )
    select array_agg(f.partition), array_agg(f.parent_id), array_agg(f.since) into v_partitions, v_ids, v_since
    from (select x.partition, x.parent_id, min(x.recorded_at) as since from forgotten x group by x.partition, x.parent_id) f;
    if v_ids is not null then
        update flowfabric.step s set is_stray = true
        from unnest(v_partitions, v_ids, v_since) as u (partition, id, since)
        join flowfabric.execution e on e.partition = u.partition and e.id = u.id
        where s.partition = e.partition and s.id = e.id and s.generation = e.generation and s.recorded_at >= u.since;
    end if;
end;
$$;

-- was_stopped: whether a member of a flow was cancelled, other than as the loser of a race, or by the handler that submitted
-- the flow.
create or replace function flowfabric.was_stopped(p_flow uuid) returns boolean
language sql stable as $$
    select exists (
        select from flowfabric.execution m where m.flow_id = p_flow and m.state = 'cancelled' and m.cancelled_by is distinct from 'handler'
          and coalesce(m.cancellation_reason, '') not in ('sibling_quorum_satisfied', 'sibling_quorum_impossible'))
$$;
