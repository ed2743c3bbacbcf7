-- collect_reservations: give back or charge what reservations hold whose lease has ended
--
-- Called under the locks of the budgets. Executions are read without a lock: a lease that has ended stays ended.
-- Takes    p_partition, p_id: executions, whose reservations are taken whatever their number. p_others: up to 1,000 others
--          of each budget too. p_lost: how the leases of these executions end now; null: read it.
-- Returns  how many rows of reservations were handled.
create or replace function flowfabric.collect_reservations(
    p_budgets uuid[], p_partition integer[], p_id uuid[], p_others boolean, p_lost boolean, p_now timestamptz)
returns integer
language plpgsql as $$
declare
    v_rows flowfabric.reservation[];
    v_ends text[];
    v_before flowfabric.budget_head[]; h flowfabric.budget_head[];
    r flowfabric.reservation;
    v_charged flowfabric.reservation[] := '{}'; v_gone flowfabric.reservation[] := '{}';
    v_changed integer[] := '{}'; v_freed uuid[] := '{}';
    v_tids tid[];
    b integer; i integer; k integer; p integer;
begin
    select array_agg(q.r), array_agg(q.ends) into v_rows, v_ends
    from (select s::flowfabric.reservation as r, case coalesce(s.lost, p_lost) when true then 'lost' when false then 'clean'
                         else flowfabric.ended_lease(s::flowfabric.reservation, p_now) end as ends
          from (select distinct x.partition, x.id from unnest(p_partition, p_id) as x (partition, id)) u
          cross join lateral (select x.* from flowfabric.reservation x
                              where x.partition = u.partition and x.id = u.id offset 0) s
          where s.state = 'held' and s.budget_id = any (p_budgets)
          union all
          select o.s, o.ends
          from unnest(p_budgets) as u (id)
          cross join lateral (select s, flowfabric.ended_lease(s, p_now) as ends from flowfabric.reservation s
                              where s.budget_id = u.id and s.state = 'held'
                                and not (s.id = any (p_id)) and flowfabric.ended_lease(s, p_now) is not null
                              limit 1000) o
          where p_others) q
    where q.ends is not null;
    if v_rows is null then
        return 0;
    end if;
    v_before := flowfabric.lock_budgets(p_budgets, false);
    h := v_before;
    for i in 1 .. cardinality(v_rows) loop
        r := v_rows[i];
        b := array_position(p_budgets, r.budget_id);
        v_changed := v_changed || b;
        for p in 1 .. cardinality(r.dimensions) loop
            k := array_position((h[b]).dimensions, r.dimensions[p]);
            h[b].held[k] := greatest((h[b]).held[k] - r.amounts[p], 0);
            if v_ends[i] = 'lost' and r.on_lost = 'charge' then
                h[b].used[k] := coalesce((h[b]).used[k], 0) + r.amounts[p];
            end if;
        end loop;
        if v_ends[i] = 'lost' and r.on_lost = 'charge' then
            v_charged := v_charged || r;
        else
            v_gone := v_gone || r;
            v_freed := v_freed || r.budget_id;
        end if;
    end loop;
    perform flowfabric.write_heads(v_before, h, array(select distinct unnest(v_changed)), p_now);
    if cardinality(v_charged) > 0 then
        v_tids := flowfabric.rows_of(v_charged);
        update flowfabric.reservation s
        set state = 'charged', budget_generation = (h[array_position(p_budgets, s.budget_id)]).generation
        where s.ctid = any (v_tids);
    end if;
    if cardinality(v_gone) > 0 then
        v_tids := flowfabric.rows_of(v_gone);
        delete from flowfabric.reservation s where s.ctid = any (v_tids);
    end if;
    insert into flowfabric.budget_usage as o (partition, id, budget_id, dimension, amount)
    select n.partition, n.id, n.budget_id, u.dim, least(sum(u.amount), 9223372036854775807)::bigint
    from unnest(v_charged) as n cross join unnest(n.dimensions, n.amounts) as u (dim, amount)
    join flowfabric.execution e on e.partition = n.partition and e.id = n.id
    group by 1, 2, 3, 4
    on conflict (partition, id, budget_id, dimension)
    do update set amount = least(o.amount::numeric + excluded.amount, 9223372036854775807)::bigint;
    if cardinality(v_freed) > 0 then
        perform flowfabric.open_budgets(array(select distinct f from unnest(v_freed) as f order by 1), p_now);
    end if;
    return cardinality(v_rows);
end;
$$;

-- ended_lease: how the lease of a reservation ended: clean (its holder ended it), lost; null: it has not.
create or replace function flowfabric.ended_lease(r flowfabric.reservation, p_now timestamptz) returns text
language plpgsql stable as $$
declare
    e record;
begin
    select x.epoch, x.state, x.lease_lost, x.lease_lost_at, x.lease_expires_at, x.disposition into e
    from flowfabric.execution x where x.partition = r.partition and x.id = r.id;
    if not found then
        return case when r.lost then 'lost' else 'clean' end;
    elsif e.epoch = r.epoch and e.state = 'active' and e.lease_lost is null and e.lease_expires_at > p_now then
        return null;
    elsif r.lost is not null then
        return case when r.lost then 'lost' else 'clean' end;
    elsif e.epoch = r.epoch then
        return case when e.state = 'active' or e.lease_lost_at is not null
                         or e.disposition in ('cancelled', 'expired', 'skipped') and e.state = e.disposition then 'lost'
                    else 'clean' end;
    else
        return case when exists (select from flowfabric.attempt a
                                 where a.partition = r.partition and a.id = r.id and a.lease_epoch = r.epoch
                                   and a.lost is not null) then 'lost' else 'clean' end;
    end if;
end;
$$;
