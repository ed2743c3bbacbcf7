-- Resume conditions: a pure function of the signals recorded so far, in the order they were accepted.
--
-- Signals are given as columns: the key of the waitpoint, the name, the id, and the two parts of the source. `p_upto`
-- is how many of them count. An unknown part of a stored condition is never true.

-- passes: whether a matcher lets a signal name through; no matcher lets everything through.
create or replace function flowfabric.passes(p_matcher jsonb, p_name text) returns boolean
language sql immutable as $$
    select p_matcher is null or p_matcher in ('"Wildcard"', jsonb_build_object('ByName', p_name))
$$;

-- leaves: the leaves of a condition as rows, depth first: the keys that a leaf names, its matcher, and for a count how
-- many of what it requires.
create or replace function flowfabric.leaves(p_condition jsonb)
returns table (keys text[], matcher jsonb, kind text, wants integer)
language plpgsql immutable as $$
declare
    v_single jsonb := p_condition -> 'Single';
    v_composite jsonb := p_condition -> 'Composite';
    v_member jsonb;
begin
    if p_condition in ('"OperatorOnly"', '"TimeoutOnly"') then
        keys := '{}'; kind := p_condition #>> '{}'; matcher := null; wants := null;
    elsif jsonb_typeof(v_single -> 'waitpoint_key') = 'string' then
        keys := array[v_single ->> 'waitpoint_key']; matcher := coalesce(v_single -> 'matcher', 'null');
        kind := 'Single'; wants := 1;
    elsif v_composite ->> 'kind' = 'Count'
          and v_composite ->> 'count_kind' in ('DistinctWaitpoints', 'DistinctSignals', 'DistinctSources')
          and jsonb_typeof(v_composite -> 'waitpoints') = 'array'
          and (case when jsonb_typeof(v_composite -> 'n') = 'number'
                    then (v_composite -> 'n')::numeric between 1 and 2147483647 end) then
        keys := array(select jsonb_array_elements_text(v_composite -> 'waitpoints'));
        matcher := nullif(v_composite -> 'matcher', 'null'); kind := v_composite ->> 'count_kind';
        wants := ceil((v_composite -> 'n')::numeric);
    elsif v_composite ->> 'kind' = 'AllOf' and jsonb_typeof(v_composite -> 'members') = 'array'
          and v_composite -> 'members' <> '[]' then
        for v_member in select m from jsonb_array_elements(v_composite -> 'members') m loop
            return query select * from flowfabric.leaves(v_member);
        end loop;
        return;
    else
        keys := '{}'; kind := 'unknown'; matcher := null; wants := null;
    end if;
    if kind = 'unknown' or (matcher <> '"Wildcard"' and jsonb_typeof(matcher -> 'ByName') is distinct from 'string') then
        raise warning 'a stored resume condition is not understood and never holds';
    end if;
    return next;
end;
$$;

-- satisfiers: the earliest signal of each distinct thing that each leaf counts, as positions in the columns.
--
-- A condition holds when every leaf has as many as it requires: there is no "any" above the leaves.
-- Returns  whether it holds, and the positions, in order.
create or replace function flowfabric.satisfiers(
    p_condition jsonb, p_keys text[], p_names text[], p_ids uuid[], p_types text[], p_identities text[], p_upto integer,
    out holds boolean, out places integer[])
language sql immutable as $$
    with leaf as materialized (
        select l.wants, l.kind, l.keys, l.matcher, row_number() over () as number from flowfabric.leaves(p_condition) l
    ), firsts as materialized (
        select f.number, min(s.place)::integer as place
        from leaf f cross join unnest(p_keys, p_names, p_ids, p_types, p_identities) with ordinality
             as s (key, name, id, type, identity, place)
        where f.wants is not null and s.place <= p_upto and s.key = any (f.keys) and flowfabric.passes(f.matcher, s.name)
        group by f.number, case f.kind when 'DistinctSignals' then s.id end,
                 case f.kind when 'DistinctWaitpoints' then s.key end,
                 case f.kind when 'DistinctSources' then s.type end,
                 case f.kind when 'DistinctSources' then s.identity end
    )
    select coalesce(bool_and(f.wants is not null and (select count(*) from firsts x where x.number = f.number) >= f.wants), false),
           coalesce((select array_agg(distinct x.place order by x.place) from firsts x), '{}')
    from leaf f
$$;

-- match_detail: what one signal did for a condition, given whether it is a satisfier.
create or replace function flowfabric.match_detail(p_condition jsonb, p_key text, p_name text, p_is_first boolean) returns text
language sql immutable as $$
    select case when p_is_first then 'advanced'
                when bool_or(p_key = any (l.keys) and flowfabric.passes(l.matcher, p_name)) then 'duplicate_satisfier'
                when bool_or(p_key = any (l.keys)) then 'matcher_failed' else 'not_in_condition' end
    from flowfabric.leaves(p_condition) l
$$;

-- required_names: the signal names that a condition waits for on a key, for messages to senders.
create or replace function flowfabric.required_names(p_condition jsonb, p_key text) returns text[]
language sql immutable as $$
    select coalesce(array_agg(d.name order by d.place), '{}') from (
        select n.name, min(n.place) as place from (
            select case l.kind when 'OperatorOnly' then '__operator_only__' when 'TimeoutOnly' then '__timeout_only__'
                        else case when p_key = any (l.keys) then l.matcher ->> 'ByName' end end as name, l.place
            from flowfabric.leaves(p_condition) with ordinality as l (keys, matcher, kind, wants, place)) n
        where n.name is not null group by n.name) d
$$;
