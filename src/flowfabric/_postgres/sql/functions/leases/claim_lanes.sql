-- claim_lanes: take up to p_limit executions of several lanes in one call
--
-- Called by workers that serve more than one lane. Takes up to its share from every lane first, then fills up to
-- p_limit from the lanes in the order given.
-- Roles    work, operate
create or replace function flowfabric.claim_lanes(
    p_lanes text[], p_shares integer[], p_kinds text, p_capabilities text[], p_worker text, p_instance text,
    p_ttl_ms bigint, p_limit integer, p_sleeper uuid, p_asleep timestamptz, p_service integer, p_versioned boolean,
    p_namespace text)
returns setof flowfabric.claimed
language plpgsql security definer as $$
declare
    v_left integer := p_limit;
    v_given integer;
    v_took integer;
    v_dry boolean[] := array_fill(false, array[cardinality(p_lanes)]);
begin
    for v_pass in 0 .. 1 loop
        for i in 1 .. cardinality(p_lanes) loop
            continue when v_dry[i];
            exit when v_left <= 0;
            v_given := least(v_left, case when v_pass = 0 then p_shares[i] else v_left end);
            continue when v_given <= 0;
            return query select * from flowfabric.claim(
                p_lanes[i], p_kinds, p_capabilities, p_worker, p_instance, p_ttl_ms, v_given, p_sleeper, p_asleep, p_service,
                p_versioned, p_namespace, false);
            get diagnostics v_took = row_count;
            v_dry[i] := v_took < v_given;
            v_left := v_left - v_took;
        end loop;
    end loop;
    if v_left = p_limit and p_asleep is null then
        for i in 1 .. cardinality(p_lanes) loop
            perform flowfabric.judge_for_claim(p_lanes[i], p_kinds::text[], p_capabilities, p_service);
        end loop;
    end if;
    if v_left < p_limit and p_asleep is not null then
        perform flowfabric.get_up(p_sleeper, p_lanes, p_asleep);
    end if;
end;
$$;
