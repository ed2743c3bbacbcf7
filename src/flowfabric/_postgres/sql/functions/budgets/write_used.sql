-- The rows that a call of apply_usage leaves beside the running numbers.

-- write_used: add what items counted to what their executions used. w: per entry the item, the position of its budget, the
-- dimension and the amount, which is below 0 where a settlement takes off a charge.
create or replace function flowfabric.write_used(
    p_partition integer[], p_id uuid[], p_ids uuid[], w_item integer[], w_budget integer[], w_dim text[], w_amount bigint[])
returns void
language plpgsql as $$
declare
    c_max constant bigint := 9223372036854775807;
begin
    insert into flowfabric.budget_usage as was (partition, id, budget_id, dimension, amount)
    select p_partition[u.item], p_id[u.item], p_ids[u.budget], u.dim,
           least(greatest(sum(u.amount), -c_max), c_max)::bigint
    from unnest(w_item, w_budget, w_dim, w_amount) as u (item, budget, dim, amount)
    group by 1, 2, 3, 4
    on conflict (partition, id, budget_id, dimension)
    do update set amount = least(was.amount::numeric + excluded.amount, c_max)::bigint;
end;
$$;

-- write_spent: the same in the ledger, in the generation of each budget.
create or replace function flowfabric.write_spent(
    p_partition integer[], p_id uuid[], p_ids uuid[], p_heads flowfabric.budget_head[],
    w_item integer[], w_budget integer[], w_dim text[], w_amount bigint[], p_now timestamptz)
returns void
language plpgsql as $$
declare
    c_max constant bigint := 9223372036854775807;
begin
    insert into flowfabric.budget_spend as was (budget_id, execution_id, generation, dimension, amount, recorded_at, is_known)
    select p_ids[u.budget], p_id[u.item], (p_heads[u.budget]).generation, u.dim, least(sum(u.amount), c_max)::bigint, p_now,
           bool_or(e.id is not null)
    from unnest(w_item, w_budget, w_dim, w_amount) as u (item, budget, dim, amount)
    left join flowfabric.execution e on e.partition = p_partition[u.item] and e.id = p_id[u.item]
    group by 1, 2, 3, 4
    on conflict (budget_id, execution_id, generation, dimension)
    do update set amount = least(was.amount::numeric + excluded.amount, c_max)::bigint, recorded_at = excluded.recorded_at,
                  is_known = was.is_known or excluded.is_known;
end;
$$;

-- write_reservations: store new reservations, mark those that were settled, delete those that were cancelled.
create or replace function flowfabric.write_reservations(
    p_new flowfabric.reservation[], p_settled flowfabric.reservation[], p_gone flowfabric.reservation[], p_now timestamptz)
returns void
language plpgsql as $$
declare
    v_tids tid[];
begin
    if cardinality(p_new) > 0 then
        insert into flowfabric.reservation
        select n.partition, n.id, n.reservation_id, n.budget_id, n.epoch, e.generation, n.budget_generation, n.name, n.n,
               n.on_lost, n.state, n.dimensions, n.amounts, n.reserved_at, null, null, null
        from unnest(p_new) as n join flowfabric.execution e on e.partition = n.partition and e.id = n.id;
        update flowfabric.execution e set has_reserved = true
        from (select distinct n.partition, n.id from unnest(p_new) as n) n
        where e.partition = n.partition and e.id = n.id and e.has_reserved is null;
    end if;
    if cardinality(p_settled) > 0 then
        v_tids := flowfabric.rows_of(p_settled);
        update flowfabric.reservation s set state = 'settled', settled_at = p_now
        where s.ctid = any (v_tids);
    end if;
    if cardinality(p_gone) > 0 then
        v_tids := flowfabric.rows_of(p_gone);
        delete from flowfabric.reservation s where s.ctid = any (v_tids);
    end if;
end;
$$;

-- record_usage: record items as steps, with what is left after them. A settlement is recorded at the place of its reservation.
create or replace function flowfabric.record_usage(
    p_partition integer[], p_id uuid[], p_name text[], p_n integer[], p_reservation uuid[], p_items integer[],
    p_outs flowfabric.used[], p_settled flowfabric.reservation[], p_now timestamptz)
returns void
language plpgsql as $$
begin
    insert into flowfabric.step (partition, id, generation, name, n, kind, run, attempt_index, result, recorded_at)
    select e.partition, e.id, e.generation, coalesce(s.name, p_name[u.item]), coalesce(s.n, p_n[u.item]), 'usage',
           e.retries + e.replays, e.attempt_index,
           convert_to(coalesce((select jsonb_object_agg(l.dim, l.amount)
                                from unnest(u.left_dimensions, u.left_amounts) as l (dim, amount)), '{}')::text, 'utf8'),
           p_now
    from (select x.ordinal as item, x.left_dimensions, x.left_amounts from unnest(p_outs) as x
          where x.ordinal = any (p_items)) u
    join flowfabric.execution e on e.partition = p_partition[u.item] and e.id = p_id[u.item]
    left join lateral (select n.name, n.n from unnest(p_settled) as n
                       where n.reservation_id = p_reservation[u.item] and n.id = p_id[u.item] limit 1) s on true
    on conflict do nothing;
end;
$$;
