-- audit_satisfier_unknown: The signals that satisfied a suspension are stored.
create or replace function flowfabric.audit_satisfier_unknown(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    select 'satisfier_unknown', s.partition, s.id, s.suspension_id::text from flowfabric.suspension s
    where (s.partition, s.id) between (p_low, p_from) and (p_high, p_to) and exists (
        select from unnest(s.satisfier_signal_ids) as u (signal_id)
        left join flowfabric.signal g on g.signal_id = u.signal_id and (g.partition, g.id) is not distinct from (s.partition, s.id)
        where g.signal_id is null or g.is_dropped)
$$;
