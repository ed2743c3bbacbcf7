-- holds_lease: one row if the fence matches, none if not; the row stays locked until the transaction ends.
create or replace function flowfabric.holds_lease(
    p_partition integer, p_id uuid, p_lease uuid, p_epoch bigint, p_attempt uuid, p_index integer)
returns table (holds boolean)
language sql volatile as $$
    select true from flowfabric.lock_holders(array[p_partition], array[p_id], array[p_lease], array[p_epoch],
                                             array[p_attempt], array[p_index]) l
    where cardinality(l.ok) = 1
$$;
