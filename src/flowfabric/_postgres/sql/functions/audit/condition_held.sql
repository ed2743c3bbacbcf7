-- audit_condition_held: An open suspension is not satisfied; a suspension that signals ended was satisfied by its
-- closing signal.
create or replace function flowfabric.audit_condition_held(p_low integer, p_high integer) returns setof flowfabric.violation
language sql stable as $$
    select 'condition_held', s.partition, s.id, s.suspension_id::text from flowfabric.suspension s
    where s.partition between p_low and p_high
      and case when s.closed_at is null
               then flowfabric.first_holding(s.resume_condition, flowfabric.recorded_on(s.partition, s.waitpoint_ids, false)) is not null
               when s.close_reason = 'resumed'
               then (flowfabric.recorded_on(s.partition, s.waitpoint_ids, false)).ids[flowfabric.first_holding(
                        s.resume_condition, flowfabric.recorded_on(s.partition, s.waitpoint_ids, false))]
                    is distinct from s.closer_signal_id
                    or s.closer_signal_id <> all (coalesce(s.satisfier_signal_ids, '{}')) end
$$;
