-- audit_leased_last_event: The latest lease event agrees with whether the execution is leased.
create or replace function flowfabric.audit_leased_last_event(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with v as materialized (
        select x.* from flowfabric.event x where x.partition between p_low and p_high
    ), lease as (
        select v.*, lag(v.lease_type) over w as before, lag(v.lease_epoch) over w as epoch_before, row_number() over w as n
        from v where v.lease_type is not null
        window w as (partition by v.partition, v.id order by v.seq)
    ), e as (
        select x.* from flowfabric.execution x where (x.partition, x.id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'leased_last_event', e.partition, e.id, e.state from e
    where e.epoch > 0 and (e.state = 'active' and e.lease_lost is null)
          is distinct from coalesce((select l.lease_type in ('acquired', 'reclaimed', 'renewed') from lease l
                            where l.partition = e.partition and l.id = e.id order by l.seq desc limit 1), false)
$$;
