-- read_outcomes: how executions ended; no row for unfinished ones. An unknown one has no state.
--
-- Roles    read, submit, work, operate
create or replace function flowfabric.read_outcomes(p_partition integer[], p_id uuid[])
returns table (ordinal integer, state text, result bytea, result_encoding text, failure_reason text,
               failure_category text, cancellation_reason text)
language sql stable security definer as $$
    select u.ord::integer, e.state, e.result, e.result_encoding, e.failure_reason, e.failure_category, e.cancellation_reason
    from unnest(p_partition, p_id) with ordinality as u (partition, id, ord)
    left join flowfabric.execution e on e.partition = u.partition and e.id = u.id
    where e.id is null or e.completed_at is not null
$$;
