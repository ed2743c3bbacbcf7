-- expire_waitpoints: expire pending waitpoints; the signals they received stay recorded. An execution that is
-- parked until a signal comes there continues: none will.
create or replace function flowfabric.expire_waitpoints(p_partition integer[], p_id uuid[], p_now timestamptz) returns void
language plpgsql as $$
declare
    v_partitions integer[]; v_ids uuid[];
begin
    with expired as (
        update flowfabric.waitpoint w set state = 'expired', closed_at = p_now, close_reason = 'never_committed'
        from unnest(p_partition, p_id) as u (partition, id)
        cross join lateral (select x.ctid as tid, x.state, x.expires_at from flowfabric.waitpoint x
                            where x.partition = u.partition and x.id = u.id offset 0) f
        where w.ctid = f.tid and f.state = 'pending' and f.expires_at <= p_now
        returning w.partition, w.id, w.waitpoint_id
    )
    select array_agg(d.partition), array_agg(d.id) into v_partitions, v_ids
    from (select distinct e.partition, e.id from expired x
          join flowfabric.execution e on e.partition = x.partition and e.id = x.id
          join flowfabric.waiter r on r.partition = x.partition and r.id = x.id
               and r.awaited_partition = x.partition and r.awaited_id = x.waitpoint_id
          where e.is_parked) d;
    if v_ids is not null then
        perform flowfabric.promote(v_partitions, v_ids, p_now);
    end if;
end;
$$;
