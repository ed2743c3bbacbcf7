-- due_executions: take due timers, lock their executions, return those that are really due and set the rest again.
--
-- Locks    timers, then executions, skipping locked rows.
create or replace function flowfabric.due_executions(
    p_kind text, p_limit integer, p_after timestamptz, p_namespace text, p_tag_key text, p_tag_value text,
    p_now timestamptz)
returns flowfabric.due
language plpgsql as $$
declare
    v_partitions integer[]; v_ids uuid[]; v_due timestamptz[];
    v_locked_partitions integer[]; v_locked_ids uuid[]; v_locked_due timestamptz[];
    v_own timestamptz[]; v_ours boolean[];
    v_seen integer; v_chosen integer;
    v_answer flowfabric.due;
begin
    -- As many timers as cover p_limit executions, at least one. With a filter, only matching timers: others are neither
    -- touched nor in the way.
    with head as materialized (
        select t.ctid as tid, cardinality(t.ids) as n, t.due_at from flowfabric.timer t
        where t.kind = p_kind and t.due_at <= p_now and t.due_at > coalesce(p_after, '-infinity')
          and ((p_namespace is null and p_tag_key is null)
               or exists (select from unnest(t.partitions, t.ids) as u (partition, id)
                          join flowfabric.execution e on e.partition = u.partition and e.id = u.id
                          where (p_namespace is null or e.namespace = p_namespace)
                            and (p_tag_key is null or coalesce(e.tags ->> p_tag_key = p_tag_value, false))))
        order by t.due_at limit p_limit
    ), counted as (
        select h.tid, sum(h.n) over (order by h.due_at, h.tid) - h.n as before from head h
    ), chosen as materialized (
        select t.ctid as tid from counted c join flowfabric.timer t on t.ctid = c.tid
        where c.before < p_limit
        for update of t skip locked
    ), taken as (
        delete from flowfabric.timer t using chosen c where t.ctid = c.tid
        returning t.due_at, t.partitions, t.ids
    ), pointed as (
        select u.partition, u.id, min(t.due_at) as due
        from taken t cross join lateral unnest(t.partitions, t.ids) as u (partition, id) group by u.partition, u.id
    )
    select array_agg(p.partition order by p.partition, p.id), array_agg(p.id order by p.partition, p.id),
           array_agg(p.due order by p.partition, p.id), (select count(*) from head), (select count(*) from chosen),
           (select max(t.due_at) from taken t)
    into v_partitions, v_ids, v_due, v_seen, v_chosen, v_answer.last_due_at
    from pointed p;
    v_answer.more := v_chosen > 0 and (v_seen > v_chosen or v_seen = p_limit);
    if v_ids is null then
        v_answer.partitions := '{}'; v_answer.ids := '{}';
        return v_answer;
    end if;

    with locked as materialized (
        select e.partition, e.id, u.due, flowfabric.own_time(p_kind, e, d) as own,
               (p_namespace is null or e.namespace = p_namespace)
               and (p_tag_key is null or coalesce(e.tags ->> p_tag_key = p_tag_value, false)) as ours
        from unnest(v_partitions, v_ids, v_due) as u (partition, id, due)
        join flowfabric.execution e on e.partition = u.partition and e.id = u.id
        cross join flowfabric.deployment d
        for no key update of e skip locked
    )
    select array_agg(l.partition), array_agg(l.id), array_agg(l.due), array_agg(l.own), array_agg(l.ours)
    into v_locked_partitions, v_locked_ids, v_locked_due, v_own, v_ours
    from locked l;

    with locked as (
        select * from unnest(v_locked_partitions, v_locked_ids, v_locked_due, v_own, v_ours)
            as l (partition, id, due, own, ours)
    ), missed as (
        select * from unnest(v_partitions, v_ids, v_due) as u (partition, id, due)
        except
        select l.partition, l.id, l.due from locked l
    ), later as (
        -- Not yet due: set for its own time. Filtered out, or locked by another transaction: unchanged.
        select l.partition, l.id, case when l.ours then l.own else l.due end as due
        from locked l where l.own > p_now or (l.own is not null and not l.ours)
        union all
        select m.partition, m.id, m.due from missed m
        where exists (select from flowfabric.execution e where e.partition = m.partition and e.id = m.id)
    ), again as (
        insert into flowfabric.timer (kind, due_at, partitions, ids)
        select p_kind, l.due, array_agg(l.partition), array_agg(l.id) from later l group by l.due
    )
    select coalesce(array_agg(l.partition), '{}'), coalesce(array_agg(l.id), '{}')
    into v_answer.partitions, v_answer.ids
    from locked l where l.ours and l.own <= p_now;
    return v_answer;
end;
$$;
