-- is_used: whether an attempt of this execution already has an id that its caller minted.
create or replace function flowfabric.is_used(p_partition integer, p_id uuid, p_lease uuid, p_attempt uuid)
returns boolean
language sql stable as $$
    select exists (select from flowfabric.attempts_of(p_partition, p_id) a
                   where a.attempt_id = p_attempt or a.lease_id = p_lease)
$$;
