-- audit_tag_rows: Every tag of an execution has one row in the list of tags, and there are no others.
create or replace function flowfabric.audit_tag_rows(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    -- One partition: by key, so that rows too many are not found.
    select 'tag_rows', e.partition, e.id, e.tags::text
    from flowfabric.execution e
    where p_low = p_high and (e.partition, e.id) between (p_low, p_from) and (p_high, p_to) and e.tags is not null
      and (select count(*) from jsonb_object_keys(e.tags))
          <> (select count(*) from flowfabric.tag t join jsonb_each_text(e.tags) k
                  on t.digest = flowfabric.tag_digest(k.key, k.value)
              where t.created_at = e.created_at and t.id = e.id and t.partition = e.partition)
    union all
    -- All partitions: no index helps. Both sides are grouped together, which no statistics can make a nested join.
    select 'tag_rows', b.partition, b.id, max(b.tags)
    from (select e.partition, e.id, e.created_at, e.tags::text as tags, flowfabric.tag_digest(k.key, k.value) as digest,
                 false as is_row
          from flowfabric.execution e cross join lateral jsonb_each_text(e.tags) k
          where p_low < p_high and (e.partition, e.id) between (p_low, p_from) and (p_high, p_to) and e.tags is not null
          union all
          select t.partition, t.id, t.created_at, null, t.digest, true
          from flowfabric.tag t
          where p_low < p_high and (t.partition, t.id) between (p_low, p_from) and (p_high, p_to)) b
    group by b.partition, b.id
    having array_agg((b.digest, b.created_at) order by b.digest, b.created_at) filter (where b.is_row)
           is distinct from array_agg((b.digest, b.created_at) order by b.digest, b.created_at) filter (where not b.is_row)
$$;
