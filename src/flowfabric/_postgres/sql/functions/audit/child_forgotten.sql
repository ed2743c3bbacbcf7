-- audit_child_forgotten: No child of a cancelled or expired execution lives on, nor a member of such a flow, unless it was
-- replayed later, the execution was cancelled without its children, or a row says that they have to be cancelled. A replay
-- that was about to commit when the execution ended counts as later.
create or replace function flowfabric.audit_child_forgotten(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with forgotten as (
        select e.partition, e.id, e.parent_id, e.partition as parent_partition,
               case when e.replays = 0 then e.created_at else e.transitioned_at + interval '1 minute' end as since
        from flowfabric.execution e
        where (e.partition, e.id) between (p_low, p_from) and (p_high, p_to) and e.parent_id is not null
          and e.completed_at is null
        union all
        select f.partition, f.flow_id, f.parent_id, flowfabric.partition_of(f.parent_id, d.flow_partitions), m.since
        from flowfabric.flow f, flowfabric.deployment d
        cross join lateral (
            select min(case when m.replays = 0 then m.created_at else m.transitioned_at + interval '1 minute' end) as since
            from flowfabric.execution m where m.flow_id = f.flow_id and m.completed_at is null and not exists (
                select from flowfabric.cancel_member o where o.partition = m.partition and o.id = m.id offset 0)) m
        where (f.partition, f.flow_id) between (p_low, p_from) and (p_high, p_to) and f.parent_id is not null
    )
    select 'child_forgotten', c.partition, c.id, c.parent_id::text from forgotten c
    -- A fence (offset 0): the parents of the rows in question by their key, never all that were cancelled.
    cross join lateral (select x.partition, x.id, x.state, x.keeps_children, x.completed_at from flowfabric.execution x
                        where x.partition = c.parent_partition and x.id = c.parent_id offset 0) p
    where p.state in ('cancelled', 'expired') and p.keeps_children is not true and c.since <= p.completed_at
      and not exists (select from flowfabric.child_cancel x where x.partition = p.partition and x.id = p.id)
$$;
