-- audit_signal_count: A waitpoint counts its signals, those that were refused, and those that were dropped: all idle ones up to
-- an ordinal.
create or replace function flowfabric.audit_signal_count(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    select 'signal_count', w.partition, w.id, w.waitpoint_id::text from flowfabric.waitpoint w
    where (w.partition, w.id) between (p_low, p_from) and (p_high, p_to)
      and (w.signal_count, w.refused_signal_count, w.dropped_signal_count, 0) <> (
          select count(*), count(*) filter (where g.refused is not null), count(*) filter (where g.is_dropped),
                 count(*) filter (where g.ordinal <= w.dropped_upto and not g.is_dropped and g.match_detail <> 'advanced')
          from flowfabric.signal g
          where g.partition = w.partition and g.waitpoint_id = w.waitpoint_id and g.source_type <> 'system')
$$;
