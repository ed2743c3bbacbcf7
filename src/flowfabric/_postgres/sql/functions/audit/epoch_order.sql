-- audit_epoch_order: Epochs grow from attempt to attempt, up to the epoch of the execution.
create or replace function flowfabric.audit_epoch_order(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with e as (
        select x.* from flowfabric.execution x where (x.partition, x.id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'epoch_order', e.partition, e.id, e.epoch::text from e
    where exists (select from (select a.lease_epoch, lag(a.lease_epoch) over (order by a.attempt_index) as before
                               from flowfabric.attempts_of(e.partition, e.id) a) w
                  where w.lease_epoch <= coalesce(w.before, 0) or w.lease_epoch > e.epoch)
$$;
