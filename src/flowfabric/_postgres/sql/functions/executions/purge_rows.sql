-- purge_rows: delete ended executions and everything they own. Events and idempotency records have their own retention.
create or replace function flowfabric.purge_rows(p_partition integer[], p_id uuid[]) returns void
language plpgsql as $$
declare
    v_has_waitpoints boolean; v_has_tags boolean; v_has_unsuccessful boolean;
    v_has_budgets constant boolean := exists (select from flowfabric.budget);
begin
    delete from flowfabric.injected_input i using unnest(p_partition, p_id) as u (partition, id)
    where i.partition = u.partition and i.id = u.id;
    delete from flowfabric.attempt a using unnest(p_partition, p_id) as u (partition, id)
    where a.partition = u.partition and a.id = u.id;
    delete from flowfabric.step s using unnest(p_partition, p_id) as u (partition, id)
    where s.partition = u.partition and s.id = u.id;
    perform flowfabric.drop_frames(p_partition, p_id);
    if v_has_budgets then
        perform flowfabric.forget_usage(p_partition, p_id);
    end if;
    select coalesce(bool_or(e.has_waitpoints), false), coalesce(bool_or(e.tags is not null), false),
           coalesce(bool_or(e.state <> 'completed'), false)
    into v_has_waitpoints, v_has_tags, v_has_unsuccessful
    from unnest(p_partition, p_id) as u (partition, id)
    join flowfabric.execution e on e.partition = u.partition and e.id = u.id;
    if v_has_waitpoints then
        delete from flowfabric.signal s using unnest(p_partition, p_id) as u (partition, id)
        where s.partition = u.partition and s.id = u.id;
        delete from flowfabric.suspension s using unnest(p_partition, p_id) as u (partition, id)
        where s.partition = u.partition and s.id = u.id;
        delete from flowfabric.waitpoint w using unnest(p_partition, p_id) as u (partition, id)
        where w.partition = u.partition and w.id = u.id;
    end if;
    if v_has_tags then
        perform flowfabric.drop_tags(p_partition, p_id);
    end if;
    if v_has_unsuccessful then
        delete from flowfabric.unsuccessful w where w.ctid = any (array(
            select f.tid from unnest(p_partition, p_id) as u (partition, id)
            join flowfabric.execution e on e.partition = u.partition and e.id = u.id
            cross join lateral (select x.ctid as tid from flowfabric.unsuccessful x
                                where x.state = e.state and x.created_at = e.created_at and x.id = e.id
                                  and x.partition = e.partition offset 0) f));
    end if;
    delete from flowfabric.execution e using unnest(p_partition, p_id) as u (partition, id)
    where e.partition = u.partition and e.id = u.id;
    if v_has_budgets then
        perform flowfabric.drop_owned(p_id);
    end if;
end;
$$;
