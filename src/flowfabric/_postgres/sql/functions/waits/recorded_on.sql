-- recorded_on: the signals recorded on some waitpoints, in the order of acceptance, as columns.
--
-- Takes    p_advanced: only those that contributed. The others never affect whether a condition holds. Signals that were set
--          aside and those of timeouts are never among them.
create or replace function flowfabric.recorded_on(p_partition integer, p_waitpoints uuid[], p_advanced boolean)
returns flowfabric.recorded
language sql stable as $$
    select row(coalesce(array_agg(g.tid order by g.ordinal), '{}'), coalesce(array_agg(g.waitpoint_key order by g.ordinal), '{}'),
               coalesce(array_agg(g.signal_name order by g.ordinal), '{}'), coalesce(array_agg(g.signal_id order by g.ordinal), '{}'),
               coalesce(array_agg(g.source_type order by g.ordinal), '{}'), coalesce(array_agg(g.source_identity order by g.ordinal), '{}'),
               max(g.accepted_at))::flowfabric.recorded
    from unnest(p_waitpoints) as u (waitpoint_id)
    cross join lateral (select x.ctid as tid, x.* from flowfabric.signal x where x.partition = p_partition
                        and x.waitpoint_id = u.waitpoint_id and not x.is_dropped and x.refused is null and x.source_type <> 'system'
                        and (not p_advanced or x.match_detail = 'advanced') offset 0) g
$$;
