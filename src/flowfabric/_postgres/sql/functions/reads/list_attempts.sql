-- list_attempts: every attempt of one execution, in order.
create or replace function flowfabric.list_attempts(p_partition integer, p_id uuid)
returns setof flowfabric.attempt
language sql stable security definer as $$
    select a.* from flowfabric.attempts_of(p_partition, p_id) a order by a.attempt_index
$$;
