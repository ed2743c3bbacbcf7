-- audit_log_epochs: One epoch of the event log is current, the last; the others end one after another, within the log.
create or replace function flowfabric.audit_log_epochs(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with l as (
        select x.epoch, x.last_position, lead(x.epoch) over w is null as is_last,
               lag(x.last_position, 1, 0::bigint) over w as before, row_number() over w as n
        from flowfabric.log_epoch x window w as (order by x.epoch)
    )
    select 'log_epochs', null::integer, null::uuid, l.epoch::text from l
    where l.is_last <> (l.last_position is null) or l.last_position < l.before
       or l.last_position > flowfabric.last_position() or l.n = 1 and l.epoch <> 0
    union all
    select 'log_epochs', null::integer, null::uuid, 'none' where not exists (select from l)
$$;
