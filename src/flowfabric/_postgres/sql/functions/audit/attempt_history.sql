-- audit_attempt_history: Attempts are numbered without gaps, and the counter counts them.
create or replace function flowfabric.audit_attempt_history(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with e as (
        select x.* from flowfabric.execution x where (x.partition, x.id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'attempt_history', e.partition, e.id, e.attempts || ' counted' from e
    where (select coalesce(array_agg(a.attempt_index order by a.attempt_index), '{}') from flowfabric.attempt a
           where a.partition = e.partition and a.id = e.id)
        <> (select coalesce(array_agg(i), '{}') from generate_series(0, e.attempts - 2) i)
       or (e.attempts > 0 and (e.attempt_index is distinct from e.attempts - 1 or e.attempt_id is null))
       or (e.attempts = 0 and num_nonnulls(e.attempt_index, e.attempt_id, e.lease_id) > 0)
$$;
