-- claim_lanes: take up to p_limit executions of several lanes in one call
--
-- Called by workers that serve more than one lane. Takes up to its share from every lane first, then fills up to
-- p_limit from the lanes in the order given. A lane without a floor (queue/cover_ready.sql) has no work and is not visited: a
-- worker may serve a thousand. Mostly few lanes have work; these are read and found among those of the worker. If they are
-- many, each lane of the worker is looked up. A damaged budget raises if no lane has other work.
-- Roles    work, operate
create or replace function flowfabric.claim_lanes(
    p_lanes text[], p_shares integer[], p_kinds text, p_capabilities text[], p_worker text, p_instance text,
    p_ttl_ms bigint, p_limit integer, p_sleeper uuid, p_asleep timestamptz, p_service integer, p_versioned boolean,
    p_namespace text)
returns setof flowfabric.claimed
language plpgsql security definer as $$
declare
    c_few constant integer := 30;
    v_few integer;
    v_at integer[];   -- the positions of lanes that have work
    v_lanes text[]; v_shares integer[];
    v_left integer := p_limit;
    v_given integer;
    v_took integer;
    v_dry boolean[];
begin
    perform flowfabric.require_read_committed();
    with recursive few as (
        (select f.lane, 1 as n from flowfabric.ready_floor f order by f.lane limit 1)
        union all
        select x.lane, p.n + 1 from few p cross join lateral (
            select f.lane from flowfabric.ready_floor f where f.lane > p.lane order by f.lane limit 1) x
        where p.n <= c_few
    )
    select count(*), array_agg(array_position(p_lanes, p.lane)) into v_few, v_at from few p;
    if v_few > c_few then
        select array_agg(u.no) into v_at from unnest(p_lanes) with ordinality as u (lane, no)
        cross join lateral (select from flowfabric.ready_floor f where f.lane = u.lane limit 1) w;
    end if;
    select array_agg(p_lanes[u.no] order by u.no), array_agg(p_shares[u.no] order by u.no) into v_lanes, v_shares
    from unnest(v_at) as u (no) where u.no is not null;
    if v_lanes is null then
        return;
    end if;
    v_dry := array_fill(false, array[cardinality(v_lanes)]);
    for v_pass in 0 .. 1 loop
        for i in 1 .. cardinality(v_lanes) loop
            continue when v_dry[i];
            exit when v_left <= 0;
            v_given := least(v_left, case when v_pass = 0 then v_shares[i] else v_left end);
            continue when v_given <= 0;
            return query select * from flowfabric.claim(
                v_lanes[i], p_kinds, p_capabilities, p_worker, p_instance, p_ttl_ms, v_given, p_sleeper, p_asleep, p_service,
                p_versioned, p_namespace, false);
            get diagnostics v_took = row_count;
            v_dry[i] := v_took < v_given;
            v_left := v_left - v_took;
        end loop;
    end loop;
    if v_left = p_limit and current_setting('flowfabric.damage', true) <> '' then
        perform flowfabric.corrupt(current_setting('flowfabric.damage'));
    end if;
    if v_left = p_limit and p_asleep is null then
        for i in 1 .. cardinality(v_lanes) loop
            perform flowfabric.judge_for_claim(v_lanes[i], p_kinds::text[], p_capabilities, p_service);
        end loop;
    end if;
    if v_left < p_limit and p_asleep is not null then
        perform flowfabric.get_up(p_sleeper, p_lanes, p_asleep);
    end if;
end;
$$;
