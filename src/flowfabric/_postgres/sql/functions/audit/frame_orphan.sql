-- audit_frame_orphan: Every frame and every summary document belongs to an attempt.
create or replace function flowfabric.audit_frame_orphan(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    select 'frame_orphan', f.partition, f.id, f.attempt_index::text
    from (select x.partition, x.id, x.attempt_index from flowfabric.frame x
          where (x.partition, x.id) between (p_low, p_from) and (p_high, p_to)
          union
          select x.partition, x.id, x.attempt_index from flowfabric.live_frame x
          where (x.partition, x.id) between (p_low, p_from) and (p_high, p_to)
          union
          select x.partition, x.id, x.attempt_index from flowfabric.summary x
          where (x.partition, x.id) between (p_low, p_from) and (p_high, p_to)) f
    left join flowfabric.execution e on e.partition = f.partition and e.id = f.id
    where e.id is null or f.attempt_index >= e.attempts
$$;
