-- settle_in: put real amounts in the place of what a reservation holds of one budget, or was charged for a lost lease
--
-- Called by apply_usage, under the lock of the budget; a cancelled reservation is settled with nothing. The head has all of
-- the dimensions, and the sums are small enough. It changes no row.
-- Returns  the new numbers; dimensions with amounts: what was counted, or taken off; is_freed: there is more room than
--          before. dimension and the rest: the first dimension in which not everything fits; that part is overrun.
create or replace function flowfabric.settle_in(
    p_head flowfabric.budget_head, r flowfabric.reservation, p_dimensions text[], p_amounts numeric[], p_now timestamptz,
    out head flowfabric.budget_head, out dimensions text[], out amounts bigint[], out is_freed boolean,
    out dimension text, out current bigint, out held bigint, out bound bigint, out asked bigint, out overrun bigint)
language plpgsql immutable as $$
declare
    v_dim text;
    k integer; a integer; p integer;
    v_asked bigint; v_had bigint; v_used bigint; v_total bigint; v_fits bigint; v_rest bigint; v_room bigint;
begin
    head := p_head;
    dimensions := '{}'; amounts := '{}'; is_freed := false;
    for k in 1 .. cardinality(head.dimensions) loop
        v_dim := head.dimensions[k];
        a := array_position(p_dimensions, v_dim);
        p := array_position(r.dimensions, v_dim);
        continue when a is null and p is null;
        v_asked := case when a is null then 0 else p_amounts[a]::bigint end;
        v_had := case when p is null then 0 else r.amounts[p] end;
        v_used := coalesce(head.used[k], 0);
        v_total := v_used + head.held[k];
        -- Amounts that were held, or charged before, count without a check. The rest must fit.
        if r.state = 'held' then
            head.held[k] := greatest(head.held[k] - v_had, 0);
            v_fits := least(v_asked, v_had);
        elsif r.budget_generation = head.generation then
            v_fits := greatest(least(v_asked, v_had) - v_had, -v_used);
        else
            v_fits := 0;   -- an earlier period keeps the charge
        end if;
        v_rest := greatest(v_asked - v_had, 0);
        if v_rest > 0 and head.is_strict and head.hard[k] > 0 then
            v_room := greatest(head.hard[k] - v_used - head.held[k] - v_fits, 0);
            if v_rest > v_room then
                head.overrun[k] := least(head.overrun[k]::numeric + (v_rest - v_room), 9223372036854775807)::bigint;
                if dimension is null then
                    dimension := v_dim; current := v_used + v_fits + v_room; held := head.held[k]; bound := head.hard[k];
                    asked := v_asked; overrun := v_rest - v_room;
                    head.breaches := head.breaches + 1;
                    head.last_breach_at := p_now; head.last_breach_dim := v_dim;
                end if;
                v_rest := v_room;
            end if;
        end if;
        v_fits := v_fits + v_rest;
        if a is not null or v_fits <> 0 then
            head.used[k] := v_used + v_fits;
        end if;
        if v_fits <> 0 then
            dimensions := dimensions || v_dim; amounts := amounts || v_fits;
        end if;
        is_freed := is_freed or coalesce(head.used[k], 0) + head.held[k] < v_total;
    end loop;
end;
$$;
