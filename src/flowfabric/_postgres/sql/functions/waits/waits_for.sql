-- waits_for: everything that a parked or suspended execution waits for, in words for people.
--
-- Takes    the ids and the flows of the executions it waits for (a flow where it waits for the end of a flow that is not its
--          own, else null), the keys of the waitpoints, and the time.
create or replace function flowfabric.waits_for(p_ids uuid[], p_flows uuid[], p_keys text[], p_until timestamptz) returns text
language sql stable as $$
    select 'waits ' || concat_ws(' and ',
        case when c.n = 1 then 'for child ' || right(c.one, 8) when c.n > 1 then 'for ' || c.n || ' child executions' end,
        case when f.n = 1 then 'for flow ' || right(f.one, 8) when f.n > 1 then 'for ' || f.n || ' flows' end,
        case when k.n = 1 then 'for signal ' when k.n > 1 then 'for signals ' end
            || array_to_string(k.first, ', ') || case when k.n > 10 then ' and ' || k.n - 10 || ' more' else '' end,
        'until ' || flowfabric.time_text(p_until))
    from (select count(*) as n, min(u.id::text) as one from unnest(p_ids, p_flows) as u (id, flow) where u.id is not null and u.flow is null) c,
         (select count(distinct u.flow) as n, min(u.flow::text) as one from unnest(p_flows) as u (flow)) f,
         (select count(*) as n, (array_agg(d.key order by d.key))[:10] as first
          from (select distinct u.key from unnest(p_keys) as u (key) where u.key is not null) d) k
$$;
