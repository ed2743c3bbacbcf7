-- drop_tags: delete the rows that list executions by their tags.
create or replace function flowfabric.drop_tags(p_partition integer[], p_id uuid[]) returns void
language plpgsql as $$
begin
    delete from flowfabric.tag t where t.ctid = any (array(
        select f.tid from unnest(p_partition, p_id) as u (partition, id)
        join flowfabric.execution e on e.partition = u.partition and e.id = u.id
        cross join lateral jsonb_each_text(e.tags) as k (key, value)
        cross join lateral (select x.ctid as tid from flowfabric.tag x
                            where x.digest = flowfabric.tag_digest(k.key, k.value) and x.created_at = e.created_at
                              and x.id = e.id and x.partition = e.partition offset 0) f));
end;
$$;
