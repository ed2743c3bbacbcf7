-- Resume conditions: a pure function of the signals recorded so far, in the order they were accepted.
--
-- Signals are given as columns: the key of the waitpoint, the name, the id, and the two parts of the source. An unknown
-- part of a stored condition is never true. The leaves of a condition are numbered depth first, from 1.

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

-- satisfiers: which signals satisfy a condition
--
-- A leaf counts the earliest signal of each distinct thing: each signal, waitpoint or source. A condition holds when every
-- leaf has as many as it requires: there is no "any" above the leaves. A further signal never makes it false again.
-- Returns  the position of the first signal with which it holds (null: it does not); how many things each leaf counted; per
--          signal what it did (advanced: it is counted, up to the first with which the condition holds), and whether a leaf
--          counted its source; the keys that leaves of waitpoints counted, with the number of the leaf.
create or replace function flowfabric.satisfiers(p_condition jsonb, p_signals flowfabric.recorded) returns flowfabric.weighed
language sql immutable as $$
    with leaf as materialized (
        select l.wants, l.kind, l.keys, l.matcher, (row_number() over ())::integer as number
        from flowfabric.leaves(p_condition) l
    ), seen as materialized (
        select q.number, q.kind, q.place, q.key, q.is_named, q.passes,
               q.passes and row_number() over (partition by q.number, q.passes, q.thing order by q.place) = 1 as is_first
        from (select f.number, f.kind, s.place::integer as place, s.key, s.key = any (f.keys) as is_named,
                     f.wants is not null and s.key = any (f.keys) and flowfabric.passes(f.matcher, s.name) as passes,
                     case f.kind when 'DistinctSignals' then array[s.id::text] when 'DistinctWaitpoints' then array[s.key]
                                 when 'DistinctSources' then array[s.type, s.identity] end as thing
              from leaf f cross join unnest(p_signals.keys, p_signals.names, p_signals.ids, p_signals.types, p_signals.identities)
                   with ordinality as s (key, name, id, type, identity, place)) q
    ), decided as materialized (
        select case when bool_and(x.places[f.wants] is not null) then max(x.places[f.wants]) end as closer,
               array_agg(coalesce(cardinality(x.places), 0) order by f.number) as counts
        from leaf f left join (select s.number, array_agg(s.place order by s.place) as places from seen s where s.is_first
                               group by s.number) x on x.number = f.number
    )
    select row(d.closer, d.counts, i.details, i.by_source, k.keys, k.leaves)::flowfabric.weighed
    from decided d
    cross join lateral (
        select array_agg(x.detail order by x.place) as details, array_agg(x.by_source order by x.place) as by_source
        from (select s.place, bool_or(s.is_first and s.kind = 'DistinctSources') as by_source,
                     flowfabric.match_detail(bool_or(s.is_first) and s.place <= coalesce(d.closer, s.place),
                                             bool_or(s.passes), bool_or(s.is_named)) as detail
              from seen s group by s.place) x) i
    cross join lateral (
        select array_agg(s.key) as keys, array_agg(s.number) as leaves from seen s
        where s.is_first and s.kind = 'DistinctWaitpoints') k
$$;

-- match_detail: what a signal did for a condition, given whether a leaf counts it, lets it through, or names its key.
create or replace function flowfabric.match_detail(p_is_first boolean, p_passes boolean, p_is_named boolean) returns text
language sql immutable as $$
    select case when p_is_first then 'advanced' when p_passes then 'duplicate_satisfier'
                when p_is_named then 'matcher_failed' else 'not_in_condition' end
$$;

-- source_hash: finds the source of a signal among those that the condition of a suspension counted. Sources with the same
-- hash are possible: compare them too.
create or replace function flowfabric.source_hash(p_suspension uuid, p_type text, p_identity text) returns bigint
language sql immutable as $$
    select hashtextextended(p_suspension || length(p_type)::text || ':' || p_type || p_identity, 0)
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
