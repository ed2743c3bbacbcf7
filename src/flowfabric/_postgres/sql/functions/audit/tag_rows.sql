-- audit_tag_rows: Every tag of an execution has one row in the list of tags, and there are no others.
create or replace function flowfabric.audit_tag_rows(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with listed as (   -- no index helps here: only for all partitions together
        select t.partition, t.id, count(*) as n from flowfabric.tag t where p_low < p_high group by t.partition, t.id
    )
    select 'tag_rows', e.partition, e.id, e.tags::text
    from flowfabric.execution e
    left join listed l on l.partition = e.partition and l.id = e.id
    where (e.partition, e.id) between (p_low, p_from) and (p_high, p_to)
      and ((e.tags is not null
            and (select count(*) from jsonb_object_keys(e.tags))
                <> (select count(*) from flowfabric.tag t join jsonb_each_text(e.tags) k
                        on t.digest = flowfabric.tag_digest(k.key, k.value)
                    where t.created_at = e.created_at and t.id = e.id and t.partition = e.partition))
           or (p_low < p_high
               and coalesce(l.n, 0) <> coalesce((select count(*) from jsonb_object_keys(e.tags)), 0)))
$$;
