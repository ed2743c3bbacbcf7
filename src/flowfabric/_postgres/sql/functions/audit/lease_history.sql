-- audit_lease_history: A lease is acquired, renewed, then lost or given back, before the next one.
create or replace function flowfabric.audit_lease_history(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with v as materialized (
        select x.* from flowfabric.event x where x.partition between p_low and p_high
    ), lease as (
        select v.*, lag(v.lease_type) over w as before, lag(v.lease_epoch + (v.lease_type = 'reclaimed')::integer) over w as epoch_before, row_number() over w as n
        from v where v.lease_type is not null
        window w as (partition by v.partition, v.id order by v.seq)
    )
    select 'lease_history', l.partition, l.id, coalesce(l.before, '-') || ' then ' || l.lease_type
    from lease l where not coalesce(case
        -- the beginning of its history may have been trimmed, if the execution is older than the log keeps events
        when l.before is null and l.lease_type <> 'acquired' then not exists (
            select from flowfabric.execution e cross join flowfabric.deployment d
            where e.partition = l.partition and e.id = l.id and e.created_at >= flowfabric.now() - d.event_retention)
        when l.lease_type in ('acquired') then l.before is null or l.before = 'revoked'
             -- the execution or the attempt ended before the lease was revoked
             or (l.before = 'expired' and not exists (select from flowfabric.attempts_of(l.partition, l.id) a
                     where a.lease_epoch = l.epoch_before and a.disposition = 'reclaimed'))
        when l.lease_type = 'reclaimed' then l.before in ('expired', 'revoked')
        when l.lease_type = 'renewed' then l.before in ('acquired', 'reclaimed', 'renewed') and l.epoch_before = l.lease_epoch
        when l.lease_type = 'expired' then l.before in ('acquired', 'reclaimed', 'renewed') and l.epoch_before = l.lease_epoch
        when l.lease_type = 'revoked' then l.before in ('acquired', 'reclaimed', 'renewed')
             or (l.before in ('expired', 'revoked') and l.reason = 'max_reclaims_exceeded')
        else false end, false)
$$;
