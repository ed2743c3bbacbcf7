-- audit_suspension_facts: An open suspension and its execution agree about times, attempt and reason.
create or replace function flowfabric.audit_suspension_facts(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with e as (
        select x.* from flowfabric.execution x where (x.partition, x.id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'suspension_facts', s.partition, s.id, s.suspension_id::text
    from flowfabric.suspension s join e on e.partition = s.partition and e.id = s.id
    where s.closed_at is null and (
        e.suspension_timeout_at is distinct from s.timeout_at or e.attempt_timeout_at is not null
        or e.attempt_index <> s.attempt_index or e.attempt_id <> s.attempt_id or not e.has_waitpoints
        or e.blocking_reason <> flowfabric.suspension_blocks(s.reason_code) or s.close_reason is not null)
$$;
