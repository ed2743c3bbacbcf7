-- apply_usage: report, reserve, settle and cancel, for many items in one call
--
-- Called by use_budgets, report_usage_admin and record_spend. The items are handled in their order, as if each were a call
-- of its own: known keys first, then the lease, then the limits; an item changes all of its budgets or none.
-- Takes    per item what to do (null: report), the fence, the key, the name and number outside a step, the reservation;
--          p_budget_item with p_budget, and p_amount_item with p_dimension and p_amount: lists, with the item of each
--          entry. A report or reservation without budgets means those of the execution. p_fenced: the caller must hold
--          the lease; otherwise p_id is null, or with p_ledger the execution that spends.
-- Locks    the executions, by partition and id; then the budgets, by id.
-- Returns  one row per item: ok, soft, hard, applied, reserved, cancelled, or the reason it was refused.
create or replace function flowfabric.apply_usage(
    p_op text[], p_fenced boolean, p_ledger boolean, p_partition integer[], p_id uuid[], p_lease uuid[], p_epoch bigint[],
    p_attempt uuid[], p_index integer[], p_key text[], p_name text[], p_n integer[], p_reservation uuid[], p_on_lost text[],
    p_budget_item integer[], p_budget uuid[], p_amount_item integer[], p_dimension text[], p_amount bigint[])
returns setof flowfabric.used
language plpgsql as $$
declare
    c_max constant bigint := 9223372036854775807;
    v_count constant integer := cardinality(p_id);
    v_now timestamptz;
    v_ok integer[];
    v_refused boolean := false;
    -- what is asked for, by item and dimension; the range of each item
    a_item integer[]; a_dim text[]; a_amount numeric[];
    a_first integer[] := array_fill(1, array[v_count]); a_last integer[] := array_fill(0, array[v_count]);
    -- the budgets of items, as positions in v_ids; the range of each item
    r_item integer[]; r_budget integer[];
    r_first integer[] := array_fill(1, array[v_count]); r_last integer[] := array_fill(0, array[v_count]);
    v_ids uuid[]; v_missing boolean;
    v_before flowfabric.budget_head[]; h flowfabric.budget_head[];
    v_reserves boolean := coalesce(array['reserve', 'settle', 'cancel'] && p_op, false);
    -- reservations of items, sorted by budget; the range of each item
    x_res flowfabric.reservation[]; x_item integer[]; x_no integer[];
    x_first integer[]; x_last integer[];
    v_looked boolean := false;      -- reservations whose lease ended were given back or charged
    v_dead uuid[];
    v_seen text[] := '{}';          -- known keys, each with the position of its budget
    v_known integer[] := '{}'; v_recorded bytea[] := '{}';   -- items that are recorded as steps
    v_done text[];                  -- places and reservations that earlier items of this call used
    v_outs flowfabric.used[]; o flowfabric.used; r flowfabric.reservation;
    v_changed integer[]; v_freed integer[];
    -- rows to write
    k_budget uuid[]; k_key text[];
    w_item integer[]; w_budget integer[]; w_dim text[]; w_amount bigint[];
    s_item integer[];
    n_res flowfabric.reservation[]; e_res flowfabric.reservation[]; d_res flowfabric.reservation[];
    n_items integer[];
    v_tids tid[];
    v_op text; v_key text; v_place text; v_hits integer; v_over boolean; v_dims text[]; v_dim text; v_touched integer[];
    i integer; j integer; k integer; a integer; b integer; p integer;
    v_asked bigint; v_had bigint; v_used bigint; v_total bigint; v_fits bigint; v_rest bigint; v_room bigint;
begin
    if array_position(p_dimension, null) is not null or array_position(p_amount, null) is not null
       or cardinality(p_dimension) <> cardinality(p_amount) or cardinality(p_amount_item) <> cardinality(p_amount)
       or cardinality(p_budget_item) <> cardinality(p_budget) or exists (
           select from unnest(p_dimension, p_amount) as u (dim, amount)
           where u.amount < 0 or u.dim = '' or octet_length(u.dim) > 256 or u.dim ~ '[[:cntrl:]]') then
        raise exception 'amounts are a dimension and a number from 0 on each' using errcode = 'invalid_parameter_value';
    end if;
    select array_agg(q.item order by q.item, q.dim), array_agg(q.dim order by q.item, q.dim),
           array_agg(q.amount order by q.item, q.dim)
    into a_item, a_dim, a_amount
    from (select u.item, u.dim collate "C" as dim, sum(u.amount) as amount
          from unnest(p_amount_item, p_dimension, p_amount) as u (item, dim, amount) group by 1, 2) q;
    a_item := coalesce(a_item, '{}'); a_dim := coalesce(a_dim, '{}'); a_amount := coalesce(a_amount, '{}');
    for j in 1 .. cardinality(a_item) loop
        if j = 1 or a_item[j] <> a_item[j - 1] then
            a_first[a_item[j]] := j;
        end if;
        a_last[a_item[j]] := j;
    end loop;

    if p_fenced then
        select l.at, l.ok into v_now, v_ok
        from flowfabric.lock_holders(p_partition, p_id, p_lease, p_epoch, p_attempt, p_index) l;
    end if;
    if cardinality(p_budget_item) > 0 and not v_reserves
       and not exists (select generate_series(1, v_count) except select unnest(p_budget_item)) then
        select array_agg(q.item order by q.item, q.no), array_agg(q.no order by q.item, q.no),
               array_agg(distinct q.budget order by q.budget), bool_or(q.missing)
        into r_item, r_budget, v_ids, v_missing
        from (select u.item, u.budget, dense_rank() over (order by u.budget)::integer as no, d.id is null as missing
              from (select distinct x.item, x.budget from unnest(p_budget_item, p_budget) as x (item, budget)) u
              left join flowfabric.budget d on d.id = u.budget) q;
    else
        select array_agg(q.item order by q.item, q.no), array_agg(q.no order by q.item, q.no),
               array_agg(distinct q.budget order by q.budget), bool_or(q.missing)
        into r_item, r_budget, v_ids, v_missing
        from (select u.item, u.budget, dense_rank() over (order by u.budget)::integer as no, d.id is null as missing
              from (select x.item, x.budget from unnest(p_budget_item, p_budget) as x (item, budget)
                    union
                    select g.ord::integer, l.budget
                    from unnest(p_partition, p_id, p_op) with ordinality as g (partition, id, op, ord)
                    join flowfabric.execution e on e.partition = g.partition and e.id = g.id
                    cross join unnest(flowfabric.budgets_of(e)) as l (budget)
                    where p_fenced and coalesce(g.op, 'report') in ('report', 'reserve') and g.ord <> all (p_budget_item)
                    union
                    select g.ord::integer, s.budget_id
                    from unnest(p_partition, p_id, p_op, p_reservation, p_name, p_n) with ordinality
                         as g (partition, id, op, reservation, name, n, ord)
                    join flowfabric.execution e on e.partition = g.partition and e.id = g.id
                    -- A fence (offset 0), here and below: the plan stays on the key.
                    cross join lateral (select x.* from flowfabric.reservation x
                                        where x.partition = g.partition and x.id = g.id offset 0) s
                    where v_reserves and g.op in ('reserve', 'settle', 'cancel')
                      and (s.reservation_id = g.reservation
                           or g.op = 'reserve' and s.generation = e.generation and s.name = g.name and s.n = g.n)) u
              left join flowfabric.budget d on d.id = u.budget) q;
    end if;
    v_ids := coalesce(v_ids, '{}');
    for j in 1 .. coalesce(cardinality(r_item), 0) loop
        if j = 1 or r_item[j] <> r_item[j - 1] then
            r_first[r_item[j]] := j;
        end if;
        r_last[r_item[j]] := j;
    end loop;

    v_before := coalesce(flowfabric.lock_budgets(v_ids, v_missing), '{}');
    v_now := flowfabric.now();
    if p_key is not null then
        select coalesce(array_agg(u.no || ' ' || s.key), '{}') into v_seen
        from unnest(r_item, r_budget) as u (item, no)
        cross join lateral (select x.key, x.expires_at from flowfabric.budget_key x
                            where x.budget_id = v_ids[u.no] and x.key = p_key[u.item] limit 1) s
        where s.expires_at > v_now;
    end if;
    if p_name is not null then
        select coalesce(array_agg(g.ord::integer), '{}'), coalesce(array_agg(s.result), '{}') into v_known, v_recorded
        from unnest(p_partition, p_id, p_name, p_n) with ordinality as g (partition, id, name, n, ord)
        join flowfabric.execution e on e.partition = g.partition and e.id = g.id
        cross join lateral (select x.result from flowfabric.step x   -- one by one, whatever the statistics say
                            where x.partition = e.partition and x.id = e.id and x.generation = e.generation
                              and x.kind = 'usage' and x.name = g.name and x.n = g.n offset 0) s;
    end if;

    <<whole>> loop
        h := v_before;
        v_outs := '{}'; v_changed := '{}'; v_freed := '{}'; v_done := '{}'; v_dead := '{}'; v_refused := false;
        k_budget := '{}'; k_key := '{}'; w_item := '{}'; w_budget := '{}'; w_dim := '{}'; w_amount := '{}'; s_item := '{}';
        n_res := '{}'; n_items := '{}'; e_res := '{}'; d_res := '{}';
        if v_reserves then
            select array_agg(s.r order by g.ord, (s.r).budget_id), array_agg(g.ord::integer order by g.ord, (s.r).budget_id)
            into x_res, x_item
            from unnest(p_partition, p_id, p_op, p_reservation, p_name, p_n) with ordinality
                 as g (partition, id, op, reservation, name, n, ord)
            join flowfabric.execution e on e.partition = g.partition and e.id = g.id
            cross join lateral (select x as r from flowfabric.reservation x
                                where x.partition = g.partition and x.id = g.id offset 0) s
            where g.op in ('reserve', 'settle', 'cancel')
              and ((s.r).reservation_id = g.reservation
                   or g.op = 'reserve' and (s.r).generation = e.generation and (s.r).name = g.name and (s.r).n = g.n);
            x_first := array_fill(1, array[v_count]); x_last := array_fill(0, array[v_count]);
            for j in 1 .. coalesce(cardinality(x_item), 0) loop
                if j = 1 or x_item[j] <> x_item[j - 1] then
                    x_first[x_item[j]] := j;
                end if;
                x_last[x_item[j]] := j;
            end loop;
        end if;

        <<items>> for i in 1 .. v_count loop
            o := null;
            o.ordinal := i;
            v_op := coalesce(p_op[i], 'report');
            v_key := nullif(p_key[i], '');
            -- Known keys come before the lease: a repeated call returns the same after its lease has ended.
            v_hits := 0;
            if v_key is not null and v_op = 'report' then
                for j in r_first[i] .. r_last[i] loop
                    if r_budget[j] || ' ' || v_key = any (v_seen) then
                        v_hits := v_hits + 1;
                    end if;
                end loop;
                if v_hits > 0 and v_hits = r_last[i] - r_first[i] + 1 then
                    o.code := 'applied';
                    v_outs := v_outs || o;
                    continue items;
                end if;
            end if;
            if p_fenced and i <> all (v_ok) then
                v_refused := true;
                continue items;
            end if;
            if p_name[i] is not null then
                v_place := p_id[i] || ' ' || p_n[i] || ' ' || p_name[i];
                if i = any (v_known) then
                    o.code := case v_op when 'report' then 'applied' else 'reserved' end;
                    o.detail := convert_from(v_recorded[array_position(v_known, i)], 'utf8');
                    if v_op = 'reserve' then
                        o.reservation_state := 'settled';
                        o.reservation_id := p_reservation[i];
                        if x_last[i] >= x_first[i] then
                            r := x_res[x_first[i]];
                            o.reservation_id := r.reservation_id; o.dimensions := r.dimensions; o.amounts := r.amounts;
                        end if;
                    end if;
                    v_outs := v_outs || o;
                    continue items;
                elsif v_place = any (v_done) then
                    o.code := 'invalid_input'; o.detail := 'place';
                    v_outs := v_outs || o;
                    continue items;
                end if;
            end if;
            for a in a_first[i] .. a_last[i] loop
                if a_amount[a] > c_max then
                    o.code := 'invalid_input'; o.detail := 'overflow'; o.dimension := a_dim[a];
                end if;
            end loop;
            if o.code is not null then
                v_outs := v_outs || o;
                continue items;
            end if;

            if v_op in ('settle', 'cancel') then
                if x_last[i] < x_first[i] then
                    o.code := case v_op when 'cancel' then 'cancelled' else 'not_found' end;
                    o.reservation_id := p_reservation[i];
                    v_outs := v_outs || o;
                    continue items;
                end if;
                r := x_res[x_first[i]];
                o.reservation_id := r.reservation_id;
                if r.state = 'settled' or 'settled ' || r.reservation_id = any (v_done) then
                    o.code := 'applied';
                    v_outs := v_outs || o;
                    continue items;
                elsif r.state = 'held' and r.epoch <> p_epoch[i] and not v_looked then
                    v_dead := v_ids;
                    exit items;
                end if;
                v_dims := a_dim[a_first[i] : a_last[i]];
                for j in x_first[i] .. x_last[i] loop
                    r := x_res[j];
                    b := array_position(v_ids, r.budget_id);
                    if not (h[b]).dimensions @> (v_dims || r.dimensions) then
                        h[b] := flowfabric.widen_head(h[b], v_dims || r.dimensions);
                    end if;
                    for a in a_first[i] .. a_last[i] loop
                        k := array_position((h[b]).dimensions, a_dim[a]);
                        if a_amount[a] > c_max - coalesce((h[b]).used[k], 0) - (h[b]).held[k] then
                            o.code := 'invalid_input'; o.detail := 'overflow'; o.dimension := a_dim[a]; o.budget_id := r.budget_id;
                            v_outs := v_outs || o;
                            continue items;
                        end if;
                    end loop;
                end loop;
                v_done := v_done || ('settled ' || r.reservation_id);
                for j in x_first[i] .. x_last[i] loop
                    r := x_res[j];
                    b := array_position(v_ids, r.budget_id);
                    v_changed := v_changed || b;
                    v_over := false;
                    for k in 1 .. cardinality((h[b]).dimensions) loop
                        v_dim := (h[b]).dimensions[k];
                        a := a_first[i] - 1 + array_position(v_dims, v_dim);
                        p := array_position(r.dimensions, v_dim);
                        continue when a is null and p is null;
                        v_asked := case when a is null then 0 else a_amount[a]::bigint end;
                        v_had := case when p is null then 0 else r.amounts[p] end;
                        v_used := coalesce((h[b]).used[k], 0);
                        v_total := v_used + (h[b]).held[k];
                        -- What was held, or charged before, is counted without asking. The rest must fit.
                        if r.state = 'held' then
                            h[b].held[k] := greatest((h[b]).held[k] - v_had, 0);
                            v_fits := least(v_asked, v_had);
                        elsif r.budget_generation = (h[b]).generation then
                            v_fits := greatest(least(v_asked, v_had) - v_had, -v_used);
                        else
                            v_fits := 0;   -- an earlier period keeps the charge
                        end if;
                        v_rest := greatest(v_asked - v_had, 0);
                        if v_rest > 0 and (h[b]).is_strict and (h[b]).hard[k] > 0 then
                            v_room := greatest((h[b]).hard[k] - v_used - (h[b]).held[k] - v_fits, 0);
                            if v_rest > v_room then
                                h[b].overrun[k] := least((h[b]).overrun[k]::numeric + (v_rest - v_room), c_max)::bigint;
                                if o.code is null then
                                    o.code := 'hard'; o.budget_id := r.budget_id; o.dimension := v_dim;
                                    o.current := v_used + v_fits + v_room; o.held := (h[b]).held[k]; o.bound := (h[b]).hard[k];
                                    o.asked := v_asked; o.overrun := v_rest - v_room;
                                end if;
                                if not v_over then
                                    v_over := true;
                                    h[b].breaches := (h[b]).breaches + 1;
                                    h[b].last_breach_at := v_now; h[b].last_breach_dim := v_dim;
                                end if;
                                v_rest := v_room;
                            end if;
                        end if;
                        v_fits := v_fits + v_rest;
                        if a is not null or v_fits <> 0 then
                            h[b].used[k] := v_used + v_fits;
                        end if;
                        if v_fits <> 0 then
                            w_item := w_item || i; w_budget := w_budget || b; w_dim := w_dim || v_dim; w_amount := w_amount || v_fits;
                        end if;
                        if coalesce((h[b]).used[k], 0) + (h[b]).held[k] < v_total then
                            v_freed := v_freed || b;
                        end if;
                    end loop;
                    if v_op = 'settle' then
                        e_res := e_res || r;
                    else
                        o.dimensions := r.dimensions; o.amounts := r.amounts;
                        d_res := d_res || r;
                    end if;
                end loop;
                if v_op = 'cancel' then
                    o.code := 'cancelled';
                    v_outs := v_outs || o;
                    continue items;
                end if;
                if r.name is not null then
                    s_item := s_item || i;
                end if;
                v_touched := r_budget[r_first[i] : r_last[i]];
                if o.code is null then
                    o := flowfabric.soft_breach(o, h, v_touched, v_dims);
                    h := flowfabric.count_soft(o, h, v_touched, v_dims);
                end if;
                v_outs := v_outs || flowfabric.with_remaining(o, h, v_touched);
                continue items;
            end if;

            if v_op = 'reserve' and x_last[i] >= x_first[i] then
                r := x_res[x_first[i]];
                if r.state = 'held' and r.epoch <> p_epoch[i] and not v_looked then
                    v_dead := v_ids;   -- its lease ended: it was given back, or charged
                    exit items;
                end if;
                o.code := 'reserved'; o.reservation_id := r.reservation_id; o.reservation_state := r.state;
                o.dimensions := r.dimensions; o.amounts := r.amounts;
                v_outs := v_outs || flowfabric.with_remaining(o, h, r_budget[r_first[i] : r_last[i]]);
                continue items;
            end if;

            -- Whether everything fits, in all budgets.
            v_dims := a_dim[a_first[i] : a_last[i]];
            for j in r_first[i] .. r_last[i] loop
                b := r_budget[j];
                continue when v_hits > 0 and b || ' ' || v_key = any (v_seen);
                if not (h[b]).dimensions @> v_dims then
                    h[b] := flowfabric.widen_head(h[b], v_dims);
                end if;
                for a in a_first[i] .. a_last[i] loop
                    k := array_position((h[b]).dimensions, a_dim[a]);
                    v_used := coalesce((h[b]).used[k], 0);
                    if a_amount[a] > c_max - v_used - (h[b]).held[k] then
                        o.code := 'invalid_input'; o.detail := 'overflow'; o.dimension := a_dim[a]; o.budget_id := v_ids[b];
                        v_outs := v_outs || o;
                        continue items;
                    end if;
                end loop;
            end loop;
            for j in r_first[i] .. r_last[i] loop
                b := r_budget[j];
                continue when v_hits > 0 and b || ' ' || v_key = any (v_seen);
                continue when not (h[b]).is_strict;
                for a in a_first[i] .. a_last[i] loop
                    k := array_position((h[b]).dimensions, a_dim[a]);
                    v_used := coalesce((h[b]).used[k], 0);
                    if (h[b]).hard[k] > 0 and a_amount[a] > (h[b]).hard[k] - v_used - (h[b]).held[k] then
                        if (h[b]).held[k] > 0 and a_amount[a] <= (h[b]).hard[k] - v_used and not v_looked then
                            v_dead := array[v_ids[b]];
                            exit items;
                        end if;
                        o.code := 'hard'; o.budget_id := v_ids[b]; o.dimension := a_dim[a]; o.current := v_used;
                        o.held := (h[b]).held[k]; o.bound := (h[b]).hard[k]; o.asked := a_amount[a]::bigint; o.overrun := 0;
                        h[b].breaches := (h[b]).breaches + 1;
                        h[b].last_breach_at := v_now; h[b].last_breach_dim := a_dim[a];
                        v_changed := v_changed || b;
                        v_outs := v_outs || o;
                        continue items;
                    end if;
                end loop;
            end loop;

            v_touched := '{}';
            for j in r_first[i] .. r_last[i] loop
                b := r_budget[j];
                continue when v_hits > 0 and b || ' ' || v_key = any (v_seen);
                v_touched := v_touched || b;
                v_changed := v_changed || b;
                for a in a_first[i] .. a_last[i] loop
                    k := array_position((h[b]).dimensions, a_dim[a]);
                    if v_op = 'reserve' then
                        h[b].held[k] := (h[b]).held[k] + a_amount[a]::bigint;
                    else
                        h[b].used[k] := coalesce((h[b]).used[k], 0) + a_amount[a]::bigint;
                        w_item := w_item || i; w_budget := w_budget || b; w_dim := w_dim || a_dim[a];
                        w_amount := w_amount || a_amount[a]::bigint;
                    end if;
                end loop;
                if v_op = 'reserve' then
                    n_res := n_res || row(p_partition[i], p_id[i], p_reservation[i], v_ids[b], p_epoch[i], 0, (h[b]).generation,
                                          p_name[i], p_n[i], coalesce(p_on_lost[i], 'charge'), 'held', v_dims,
                                          a_amount[a_first[i] : a_last[i]]::bigint[], v_now, null, null)::flowfabric.reservation;
                elsif v_key is not null then
                    k_budget := k_budget || v_ids[b]; k_key := k_key || v_key;
                    v_seen := v_seen || (b || ' ' || v_key);
                end if;
            end loop;
            if p_name[i] is not null then
                v_done := v_done || v_place;
            end if;
            if v_op = 'reserve' then
                n_items := n_items || i;
                o.code := 'reserved'; o.reservation_id := p_reservation[i]; o.reservation_state := 'held';
                if r_last[i] >= r_first[i] then   -- without budgets it holds nothing
                    o.dimensions := v_dims; o.amounts := a_amount[a_first[i] : a_last[i]]::bigint[];
                end if;
            else
                if p_name[i] is not null then
                    s_item := s_item || i;
                end if;
                o := flowfabric.soft_breach(o, h, v_touched, v_dims);
                h := flowfabric.count_soft(o, h, v_touched, v_dims);
            end if;
            v_outs := v_outs || flowfabric.with_remaining(o, h, r_budget[r_first[i] : r_last[i]]);
        end loop;
        exit whole when cardinality(v_dead) = 0;
        -- Reservations whose lease ended may still be held: give them back or charge them, and begin again.
        perform flowfabric.collect_reservations(v_dead, p_partition, p_id, true, null, v_now);
        v_looked := true;
        v_before := flowfabric.lock_budgets(v_ids, false);
    end loop;

    if cardinality(v_changed) > 0 then
        perform flowfabric.write_heads(v_before, h, array(select distinct unnest(v_changed)), v_now);
    end if;
    if cardinality(k_key) > 0 then
        insert into flowfabric.budget_key (budget_id, key, expires_at)
        select u.budget, u.key, v_now + interval '24 hours' from unnest(k_budget, k_key) as u (budget, key)
        on conflict (budget_id, key) do update set expires_at = excluded.expires_at;
    end if;
    if cardinality(w_item) > 0 and p_fenced then
        insert into flowfabric.budget_usage as was (partition, id, budget_id, dimension, amount)
        select p_partition[u.item], p_id[u.item], v_ids[u.budget], u.dim,
               least(greatest(sum(u.amount), -c_max), c_max)::bigint
        from unnest(w_item, w_budget, w_dim, w_amount) as u (item, budget, dim, amount)
        group by 1, 2, 3, 4
        on conflict (partition, id, budget_id, dimension)
        do update set amount = least(was.amount::numeric + excluded.amount, c_max)::bigint;
    elsif cardinality(w_item) > 0 and p_ledger then
        insert into flowfabric.budget_spend as was (budget_id, execution_id, generation, dimension, amount, recorded_at, is_known)
        select v_ids[u.budget], p_id[u.item], (h[u.budget]).generation, u.dim, least(sum(u.amount), c_max)::bigint, v_now,
               bool_or(e.id is not null)
        from unnest(w_item, w_budget, w_dim, w_amount) as u (item, budget, dim, amount)
        left join flowfabric.execution e on e.partition = p_partition[u.item] and e.id = p_id[u.item]
        group by 1, 2, 3, 4
        on conflict (budget_id, execution_id, generation, dimension)
        do update set amount = least(was.amount::numeric + excluded.amount, c_max)::bigint, recorded_at = excluded.recorded_at,
                      is_known = was.is_known or excluded.is_known;
    end if;
    if cardinality(n_res) > 0 then
        insert into flowfabric.reservation
        select n.partition, n.id, n.reservation_id, n.budget_id, n.epoch, e.generation, n.budget_generation, n.name, n.n,
               n.on_lost, n.state, n.dimensions, n.amounts, n.reserved_at, null, null
        from unnest(n_res) as n join flowfabric.execution e on e.partition = n.partition and e.id = n.id;
        update flowfabric.execution e set has_reserved = true
        from (select distinct n.partition, n.id from unnest(n_res) as n) n
        where e.partition = n.partition and e.id = n.id and e.has_reserved is null;
    end if;
    if cardinality(e_res) > 0 then
        v_tids := flowfabric.rows_of(e_res);
        update flowfabric.reservation s set state = 'settled', settled_at = v_now
        where s.ctid = any (v_tids);
    end if;
    if cardinality(d_res) > 0 then
        v_tids := flowfabric.rows_of(d_res);
        delete from flowfabric.reservation s where s.ctid = any (v_tids);
    end if;
    if cardinality(s_item) > 0 then
        insert into flowfabric.step (partition, id, generation, name, n, kind, run, attempt_index, result, recorded_at)
        select e.partition, e.id, e.generation, coalesce(s.name, p_name[u.item]), coalesce(s.n, p_n[u.item]), 'usage',
               e.retries + e.replays, e.attempt_index,
               convert_to(coalesce((select jsonb_object_agg(l.dim, l.amount)
                                    from unnest(u.left_dimensions, u.left_amounts) as l (dim, amount)), '{}')::text, 'utf8'),
               v_now
        from (select x.ordinal as item, x.left_dimensions, x.left_amounts from unnest(v_outs) as x
              where x.ordinal = any (s_item)) u
        join flowfabric.execution e on e.partition = p_partition[u.item] and e.id = p_id[u.item]
        left join lateral (select n.name, n.n from unnest(e_res) as n
                           where n.reservation_id = p_reservation[u.item] and n.id = p_id[u.item] limit 1) s on true
        on conflict do nothing;
    end if;
    if cardinality(v_freed) > 0 then
        perform flowfabric.open_budgets(array(select distinct v_ids[f] from unnest(v_freed) as f order by 1), v_now);
    end if;
    return query select u.* from unnest(v_outs) as u;
    if v_refused then
        return query
        select f.ordinal, f.code, f.detail, f.state, f.lease_epoch, f.attempt_id, f.at, null::uuid, null::text, null::bigint,
               null::bigint, null::bigint, null::bigint, null::bigint, null::uuid, null::text, null::text[], null::bigint[],
               null::text[], null::bigint[]
        from flowfabric.refuse_holders(
            p_partition, p_id, p_lease, p_epoch, p_attempt, p_index, null,
            v_ok || array(select u.ordinal from unnest(v_outs) as u), v_now) f;
    end if;
end;
$$;

-- soft_breach: the answer to a call that was counted: ok, or the first of its dimensions that is above a soft limit.
create or replace function flowfabric.soft_breach(
    p_used flowfabric.used, p_heads flowfabric.budget_head[], p_budgets integer[], p_dimensions text[])
returns flowfabric.used
language plpgsql immutable as $$
declare
    o flowfabric.used := p_used;
    h flowfabric.budget_head;
    b integer; k integer; v_dim text;
begin
    o.code := 'ok';
    foreach b in array coalesce(p_budgets, '{}') loop
        h := p_heads[b];
        foreach v_dim in array coalesce(p_dimensions, '{}') loop
            k := array_position(h.dimensions, v_dim);
            if h.soft[k] > 0 and h.used[k] > h.soft[k] or not h.is_strict and h.hard[k] > 0 and h.used[k] > h.hard[k] then
                o.code := 'soft'; o.budget_id := h.budget_id; o.dimension := v_dim; o.current := h.used[k];
                o.bound := case when h.soft[k] > 0 and h.used[k] > h.soft[k] then h.soft[k] else h.hard[k] end;
                return o;
            end if;
        end loop;
    end loop;
    return o;
end;
$$;

-- count_soft: the running numbers after a call that is above soft limits: each of its budgets counts it once.
create or replace function flowfabric.count_soft(
    p_used flowfabric.used, p_heads flowfabric.budget_head[], p_budgets integer[], p_dimensions text[])
returns flowfabric.budget_head[]
language plpgsql immutable as $$
declare
    b integer;
begin
    if p_used.code = 'soft' then
        foreach b in array p_budgets loop
            if (flowfabric.soft_breach(null, p_heads, array[b], p_dimensions)).code = 'soft' then
                p_heads[b].soft_breaches := (p_heads[b]).soft_breaches + 1;
            end if;
        end loop;
    end if;
    return p_heads;
end;
$$;

-- with_remaining: an answer with what is left of each dimension that budgets limit: the least of them.
create or replace function flowfabric.with_remaining(
    p_used flowfabric.used, p_heads flowfabric.budget_head[], p_budgets integer[])
returns flowfabric.used
language plpgsql immutable as $$
declare
    o flowfabric.used := p_used;
    h flowfabric.budget_head;
    b integer; k integer; p integer; v_left bigint;
begin
    o.left_dimensions := '{}'; o.left_amounts := '{}';
    foreach b in array coalesce(p_budgets, '{}') loop
        h := p_heads[b];
        continue when not h.is_strict;
        for k in 1 .. cardinality(h.dimensions) loop
            continue when h.hard[k] = 0;
            v_left := greatest(h.hard[k] - coalesce(h.used[k], 0) - h.held[k], 0);
            p := array_position(o.left_dimensions, h.dimensions[k]);
            if p is null then
                o.left_dimensions := o.left_dimensions || h.dimensions[k];
                o.left_amounts := o.left_amounts || v_left;
            elsif v_left < o.left_amounts[p] then
                o.left_amounts[p] := v_left;
            end if;
        end loop;
    end loop;
    return o;
end;
$$;
