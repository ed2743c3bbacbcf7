-- Every tag of an execution has one row in the list of tags, and there are no others.
create or replace function flowfabric.audit_tag_rows(p_low integer, p_high integer) returns setof flowfabric.violation
language sql stable as $$
    with e as (
        select x.* from flowfabric.execution x where x.partition between p_low and p_high
    )
    select 'tag_rows', e.partition, e.id, e.tags::text from e
    where (select count(*) from jsonb_object_keys(coalesce(e.tags, '{}')))
        <> (select count(*) from flowfabric.tag t join jsonb_each_text(coalesce(e.tags, '{}')) k
                on t.digest = flowfabric.tag_digest(k.key, k.value)
            where t.created_at = e.created_at and t.id = e.id and t.partition = e.partition)
       or (p_low < p_high   -- has no index: only for all at once
           and (select count(*) from flowfabric.tag t where t.id = e.id and t.partition = e.partition)
               <> (select count(*) from jsonb_object_keys(coalesce(e.tags, '{}'))))
    -- every time that will come has a timer that is not later
$$;
