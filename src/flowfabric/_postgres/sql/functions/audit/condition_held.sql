-- audit_condition_held: An open suspension is not satisfied; one that was resumed by signals was satisfied by its closer. Of
-- several waits any signal since then satisfies it.
create or replace function flowfabric.audit_condition_held(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    select 'condition_held', s.partition, s.id, s.suspension_id::text from flowfabric.suspension s
    where (s.partition, s.id) between (p_low, p_from) and (p_high, p_to)
      and case when s.keeps_waitpoints
               then s.closed_at is null and exists (
                        select from unnest(s.waitpoint_ids) as u (waitpoint_id)
                        join flowfabric.signal g on g.partition = s.partition and g.waitpoint_id = u.waitpoint_id
                        where g.suspension_id = s.suspension_id)
                    or s.close_reason = 'resumed' and s.closer_signal_id <> all (coalesce(s.satisfier_signal_ids, '{}'))
               when s.closed_at is null
               then (flowfabric.satisfiers(s.resume_condition, flowfabric.recorded_on(s.partition, s.waitpoint_ids, false))).closer is not null
               when s.close_reason = 'resumed'
               then (flowfabric.recorded_on(s.partition, s.waitpoint_ids, false)).ids[(flowfabric.satisfiers(
                        s.resume_condition, flowfabric.recorded_on(s.partition, s.waitpoint_ids, false))).closer]
                    is distinct from s.closer_signal_id
                    or s.closer_signal_id <> all (coalesce(s.satisfier_signal_ids, '{}')) end
$$;
