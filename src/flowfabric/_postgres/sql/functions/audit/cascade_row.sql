-- audit_cascade_row: A pending cascade describes an end that happened.
create or replace function flowfabric.audit_cascade_row(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with owed as (
        select x.* from flowfabric.pending_cascade x where x.partition between p_low and p_high
    )
    select 'cascade_row', o.partition, o.id, o.seq::text from owed o
    left join flowfabric.execution e on e.partition = o.partition and e.id = o.id and e.flow_id = o.flow_id
    where e.id is null or o.outcome not in ('success', 'failed', 'cancelled', 'expired', 'skipped')
       or o.run >= e.replays + case when e.completed_at is null then 0 else 1 end
       or (o.run = e.replays and o.outcome <> flowfabric.outcome_of(e.state))
$$;
