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
-- Parts    usage_amounts, usage_budgets and known_keys read what the items concern; then one item after the other, in memory:
--          refused, settled (settle_in), held or counted; soft_breach and with_remaining make the results; write_heads,
--          write_used and their neighbours store what changed, once per call.
-- The loop over the items is one body because each item reads and changes what those before it left in memory: heads, keys,
-- places, reservations. A function for a part of it would receive and return all of these, copied for every item; and the
-- whole loop begins again when it meets a reservation whose lease ended. Single reports do not come here (report_one).
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
    v_ok integer[]; v_until timestamptz;
    v_refused boolean := false;
    -- what is asked for, by item and dimension; the range of each item
    a_item integer[]; a_dim text[]; a_amount numeric[];
    a_first integer[] := array_fill(1, array[v_count]); a_last integer[] := array_fill(0, array[v_count]);
    -- the budgets of items, as positions in v_ids; the range of each item
    r_item integer[]; r_budget integer[];
    r_first integer[] := array_fill(1, array[v_count]); r_last integer[] := array_fill(0, array[v_count]);
    v_ids uuid[];
    v_before flowfabric.budget_head[]; h flowfabric.budget_head[];
    v_reserves boolean := coalesce(array['reserve', 'settle', 'cancel'] && p_op, false);
    -- reservations of items, sorted by budget; the range of each item
    x_res flowfabric.reservation[]; x_item integer[];
    x_first integer[]; x_last integer[];
    v_looked boolean := false;      -- reservations whose lease ended were given back or charged
    v_dead uuid[];
    v_stored text[] := '{}';        -- known keys, each with the position of its budget
    v_seen text[];                  -- the same, with those of earlier items
    v_known integer[] := '{}'; v_recorded bytea[] := '{}';   -- items that are recorded as steps
    v_done text[];                  -- places and reservations that earlier items of this call used
    v_outs flowfabric.used[]; o flowfabric.used; r flowfabric.reservation;
    v_changed integer[]; v_freed integer[];
    -- rows to write
    k_budget uuid[]; k_key text[];
    w_item integer[]; w_budget integer[]; w_dim text[]; w_amount bigint[];
    s_item integer[];
    n_res flowfabric.reservation[]; e_res flowfabric.reservation[]; d_res flowfabric.reservation[];
    v_op text; v_key text; v_place text; v_hits integer; v_dims text[]; v_touched integer[];
    v record;                       -- what a function returned
    i integer; j integer; k integer; a integer; b integer; v_used bigint;
begin
    v := flowfabric.usage_amounts(p_amount_item, p_dimension, p_amount);
    a_item := v.items; a_dim := v.dimensions; a_amount := v.amounts;
    for j in 1 .. cardinality(a_item) loop
        if j = 1 or a_item[j] <> a_item[j - 1] then
            a_first[a_item[j]] := j;
        end if;
        a_last[a_item[j]] := j;
    end loop;

    if p_fenced then
        select l.ok, l.until into v_ok, v_until
        from flowfabric.lock_holders(p_partition, p_id, p_lease, p_epoch, p_attempt, p_index) l;
    end if;
    v := flowfabric.usage_budgets(p_op, p_fenced, p_partition, p_id, p_name, p_n, p_reservation, p_budget_item, p_budget);
    r_item := v.items; r_budget := v.numbers; v_ids := v.ids;
    for j in 1 .. cardinality(r_item) loop
        if j = 1 or r_item[j] <> r_item[j - 1] then
            r_first[r_item[j]] := j;
        end if;
        r_last[r_item[j]] := j;
    end loop;

    v_before := coalesce(flowfabric.lock_budgets(v_ids, v.missing), '{}');
    v_now := flowfabric.now();
    if v_until <= v_now then   -- perhaps while this call waited for a budget
        select l.at, l.ok into v_now, v_ok
        from flowfabric.lock_holders(p_partition, p_id, p_lease, p_epoch, p_attempt, p_index) l;
    end if;
    if p_key is not null then
        v_stored := flowfabric.known_keys(p_key, r_item, r_budget, v_ids, v_now);
    end if;
    if p_name is not null then
        v := flowfabric.recorded_usage(p_partition, p_id, p_name, p_n);
        v_known := v.items; v_recorded := v.results;
    end if;

    <<whole>> loop
        h := v_before; v_seen := v_stored;
        v_outs := '{}'; v_changed := '{}'; v_freed := '{}'; v_done := '{}'; v_dead := '{}'; v_refused := false;
        k_budget := '{}'; k_key := '{}'; w_item := '{}'; w_budget := '{}'; w_dim := '{}'; w_amount := '{}'; s_item := '{}';
        n_res := '{}'; e_res := '{}'; d_res := '{}';
        if v_reserves then
            v := flowfabric.usage_reservations(p_op, p_partition, p_id, p_name, p_n, p_reservation);
            x_res := v.rows; x_item := v.items;
            x_first := array_fill(1, array[v_count]); x_last := array_fill(0, array[v_count]);
            for j in 1 .. cardinality(x_item) loop
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
                        -- Amounts that are held, or were charged, are in these numbers already.
                        if a_amount[a] - coalesce(r.amounts[array_position(r.dimensions, a_dim[a])], 0)
                           > c_max - coalesce((h[b]).used[k], 0) - (h[b]).held[k] then
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
                    v := flowfabric.settle_in(h[b], r, v_dims, a_amount[a_first[i] : a_last[i]], v_now);
                    h[b] := v.head;
                    for k in 1 .. cardinality(v.dimensions) loop
                        w_item := w_item || i; w_budget := w_budget || b;
                        w_dim := w_dim || v.dimensions[k]; w_amount := w_amount || v.amounts[k];
                    end loop;
                    if v.is_freed then
                        v_freed := v_freed || b;
                    end if;
                    if o.code is null and v.dimension is not null then
                        o.code := 'hard'; o.budget_id := r.budget_id; o.dimension := v.dimension;
                        o.current := v.current; o.held := v.held; o.bound := v.bound;
                        o.asked := v.asked; o.overrun := v.overrun;
                    end if;
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
                            v_dead := v_ids;
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
                                          a_amount[a_first[i] : a_last[i]]::bigint[], v_now, null, null, null)::flowfabric.reservation;
                elsif v_key is not null then
                    k_budget := k_budget || v_ids[b]; k_key := k_key || v_key;
                    v_seen := v_seen || (b || ' ' || v_key);
                end if;
            end loop;
            if p_name[i] is not null then
                v_done := v_done || v_place;
            end if;
            if v_op = 'reserve' then
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
        perform flowfabric.write_used(p_partition, p_id, v_ids, w_item, w_budget, w_dim, w_amount);
    elsif cardinality(w_item) > 0 and p_ledger then
        perform flowfabric.write_spent(p_partition, p_id, v_ids, h, w_item, w_budget, w_dim, w_amount, v_now);
    end if;
    if cardinality(n_res) > 0 or cardinality(e_res) > 0 or cardinality(d_res) > 0 then
        perform flowfabric.write_reservations(n_res, e_res, d_res, v_now);
    end if;
    if cardinality(s_item) > 0 then
        perform flowfabric.record_usage(p_partition, p_id, p_name, p_n, p_reservation, s_item, v_outs, e_res, v_now);
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
