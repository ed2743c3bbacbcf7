-- promote: delayed or parked -> waiting, or resumable after a suspension; which attempt comes next is unchanged. Everything
-- else it waited for is forgotten.
create or replace function flowfabric.promote(p_partition integer[], p_id uuid[], p_now timestamptz) returns void
language plpgsql as $$
begin
    update flowfabric.execution e
    set state = case when e.resume_pending then 'resumable' else 'waiting' end, blocking_reason = 'waiting_for_worker',
        blocking_detail = null, delay_until = null, is_parked = false, transitioned_at = p_now, mutated_at = null
    from unnest(p_partition, p_id) as u (partition, id)
    where e.partition = u.partition and e.id = u.id;
    perform flowfabric.forget_waits(p_partition, p_id);
    perform flowfabric.make_ready(p_partition, p_id, null);
end;
$$;
