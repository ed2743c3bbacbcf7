-- audit_condition_counts: An open suspension has counted what its signals come to: per leaf of the condition, on its
-- waitpoints, and by source.
create or replace function flowfabric.audit_condition_counts(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    select 'condition_counts', s.partition, s.id, s.suspension_id::text
    from flowfabric.suspension s
    cross join lateral (select flowfabric.recorded_on(s.partition, s.waitpoint_ids, false) as signals offset 0) r
    cross join lateral flowfabric.satisfiers(s.resume_condition, r.signals) x
    where (s.partition, s.id) between (p_low, p_from) and (p_high, p_to) and s.closed_at is null and not s.keeps_waitpoints
      and (x.counts <> coalesce(s.counts, array_fill(0, array[cardinality(x.counts)]))
           or exists (select from unnest(s.waitpoint_ids) as u (waitpoint_id)
                      cross join lateral (select w.waitpoint_key, w.counted_by from flowfabric.waitpoint w
                                          where w.partition = s.partition and w.waitpoint_id = u.waitpoint_id offset 0) w
                      where (select array_agg(c order by c) from unnest(w.counted_by) c) is distinct from
                            (select array_agg(k.leaf order by k.leaf) from unnest(x.keys, x.key_leaves) as k (key, leaf)
                             where k.key = w.waitpoint_key))
           or exists (select from unnest((r.signals).tids, x.details, x.by_source) as u (tid, detail, by_source)
                      join flowfabric.signal g on g.ctid = u.tid
                      where (g.match_detail, g.source_hash) is distinct from
                            (u.detail, case when u.by_source then
                                 flowfabric.source_hash(s.suspension_id, g.source_type, g.source_identity) end)))
$$;
