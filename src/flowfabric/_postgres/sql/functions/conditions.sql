-- Resume conditions: a pure function of the signals recorded so far, in the order they were accepted.
--
-- Signals are given as columns: the key of the waitpoint, the name, the id, and the two parts of the source. `p_upto` is
-- how many of them count. Whatever a stored condition holds that is not known here never becomes true.

-- passes: whether a matcher lets a signal name through; no matcher lets everything through.
create or replace function flowfabric.passes(p_matcher jsonb, p_name text) returns boolean
language sql immutable as $$
    select case when p_matcher is null or jsonb_typeof(p_matcher) = 'null' or p_matcher = '"Wildcard"' then true
                else coalesce(p_matcher ->> 'ByName' = p_name, false) end
$$;

-- leaves: the leaves of a condition as rows, depth first: the keys that a leaf names, its matcher, and for a count how
-- many of what it wants.
create or replace function flowfabric.leaves(p_condition jsonb)
returns table (keys text[], matcher jsonb, kind text, wants integer)
language plpgsql immutable as $$
declare
    v_member jsonb;
begin
    if jsonb_typeof(p_condition) = 'string' then
        keys := '{}'; kind := p_condition #>> '{}'; matcher := null; wants := null;
        return next;
    elsif p_condition ? 'Single' then
        keys := array[p_condition -> 'Single' ->> 'waitpoint_key']; matcher := p_condition -> 'Single' -> 'matcher';
        kind := 'Single'; wants := 1;
        return next;
    elsif p_condition -> 'Composite' ->> 'kind' = 'Count'
          and p_condition -> 'Composite' ->> 'count_kind' in ('DistinctWaitpoints', 'DistinctSignals', 'DistinctSources') then
        keys := array(select jsonb_array_elements_text(p_condition -> 'Composite' -> 'waitpoints'));
        matcher := p_condition -> 'Composite' -> 'matcher'; kind := p_condition -> 'Composite' ->> 'count_kind';
        wants := (p_condition -> 'Composite' ->> 'n')::integer;
        return next;
    elsif p_condition -> 'Composite' ->> 'kind' = 'AllOf' then
        for v_member in select m from jsonb_array_elements(p_condition -> 'Composite' -> 'members') m loop
            return query select * from flowfabric.leaves(v_member);
        end loop;
    else
        raise warning 'a stored resume condition is not understood and never holds';
        keys := '{}'; kind := 'unknown'; matcher := null; wants := null;
        return next;
    end if;
end;
$$;

-- satisfiers: the earliest signal of each distinct thing that each leaf counts, as places in the columns.
--
-- A condition holds when every leaf has as many as it wants: there is no "any" above the leaves.
-- Answers  whether it holds, and the places, in order.
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

-- match_detail: what one signal did for a condition, when its place is known to be a satisfier or not.
create or replace function flowfabric.match_detail(p_condition jsonb, p_key text, p_name text, p_is_first boolean) returns text
language sql immutable as $$
    select case when p_is_first then 'advanced'
                when bool_or(p_key = any (l.keys) and flowfabric.passes(l.matcher, p_name)) then 'duplicate_satisfier'
                when bool_or(p_key = any (l.keys)) then 'matcher_failed' else 'not_in_condition' end
    from flowfabric.leaves(p_condition) l
$$;

-- required_names: the signal names that a condition waits for on a key, for whoever wants to send one.
create or replace function flowfabric.required_names(p_condition jsonb, p_key text) returns text[]
language sql immutable as $$
    select coalesce(array_agg(d.name order by d.place), '{}') from (
        select n.name, min(n.place) as place from (
            select case l.kind when 'OperatorOnly' then '__operator_only__' when 'TimeoutOnly' then '__timeout_only__'
                        else case when p_key = any (l.keys) then l.matcher ->> 'ByName' end end as name, l.place
            from flowfabric.leaves(p_condition) with ordinality as l (keys, matcher, kind, wants, place)) n
        where n.name is not null group by n.name) d
$$;
