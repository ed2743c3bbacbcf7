-- refuse_appends: why the other holders of an append were refused.
--
-- Called under the locks of lock_holders. Unlike refuse_holders it changes nothing: a lease that expired is not marked.
-- Returns  one verdict per refused holder: invalid_input, not_found, stream_closed (detail: why it is closed) or
--          stale_owner_cannot_append.
create or replace function flowfabric.refuse_appends(
    p_partition integer[], p_id uuid[], p_lease uuid[], p_epoch bigint[], p_attempt uuid[], p_ok integer[])
returns table (holder integer, code text, detail text)
language sql stable as $$
    select u.o::integer,
           case when num_nulls(u.lease, u.epoch, u.attempt) > 0 then 'invalid_input'
                when e.id is null then 'not_found'
                when c.reason is not null then 'stream_closed'
                else 'stale_owner_cannot_append' end,
           case when num_nulls(u.lease, u.epoch, u.attempt) = 3 then 'fence_required'
                when num_nulls(u.lease, u.epoch, u.attempt) > 0 then 'partial_fence_triple'
                else c.reason end
    from unnest(p_partition, p_id, p_lease, p_epoch, p_attempt) with ordinality as u (partition, id, lease, epoch, attempt, o)
    left join flowfabric.execution e on e.partition = u.partition and e.id = u.id
    left join lateral (select flowfabric.closed_as(h.disposition, h.lost, h.failure_reason, h.failure_category) as reason
                       from flowfabric.attempts_of(u.partition, u.id) h where h.attempt_id = u.attempt limit 1) c on true
    where u.o <> all (p_ok)
$$;
