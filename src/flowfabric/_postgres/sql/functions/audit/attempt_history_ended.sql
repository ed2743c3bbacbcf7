-- audit_attempt_history_ended: Every attempt that a later one replaced has ended.
create or replace function flowfabric.audit_attempt_history_ended(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    select 'attempt_history_ended', a.partition, a.id, a.attempt_index::text from flowfabric.attempt a
    where (a.partition, a.id) between (p_low, p_from) and (p_high, p_to)
      and (a.attempt_lifecycle not in ('ended_success', 'ended_failure', 'ended_cancelled', 'interrupted_reclaimed')
           or a.ended_at is null or a.disposition is null)
$$;
