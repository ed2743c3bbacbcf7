-- audit_summary_version: A summary document is as far as its stream says, its later deltas are stored, and no value in it is
-- the text that means null.
create or replace function flowfabric.audit_summary_version(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    select 'summary_version', s.partition, s.id, s.attempt_index::text
    from flowfabric.summary s
    left join lateral (select f.version, f.folded from flowfabric.frame f
                       where f.partition = s.partition and f.id = s.id and f.attempt_index = s.attempt_index
                       order by f.ms desc, f.n desc limit 1) l on true
    where (s.partition, s.id) between (p_low, p_from) and (p_high, p_to)
      and (l.folded is distinct from s.version
           or l.version - s.version <> (select coalesce(sum(f.size), 0) from flowfabric.frame f
                                        where f.partition = s.partition and f.id = s.id and f.attempt_index = s.attempt_index
                                          and f.mode = 'summary' and f.version > s.version)
           or jsonb_path_exists(s.document, '$.** ? (@ == "__ff_null__")'))
    union all
    select distinct 'summary_version', f.partition, f.id, f.attempt_index || ' has no document'
    from flowfabric.frame f
    where (f.partition, f.id) between (p_low, p_from) and (p_high, p_to) and f.folded > 0
      and not exists (select from flowfabric.summary s
                      where s.partition = f.partition and s.id = f.id and s.attempt_index = f.attempt_index)
$$;
