-- set_tag: returns whether the execution exists.
--
-- Roles    operate
create or replace function flowfabric.set_tag(p_partition integer, p_id uuid, p_key text, p_value text) returns boolean
language plpgsql security definer as $$
declare
    e flowfabric.execution;
begin
    e := flowfabric.lock_execution(p_partition, p_id);
    if e.id is null then
        return false;
    end if;
    delete from flowfabric.tag t
    where t.digest = flowfabric.tag_digest(p_key, e.tags ->> p_key) and t.created_at = e.created_at and t.id = e.id
      and t.partition = e.partition;
    insert into flowfabric.tag (digest, created_at, id, partition)
    values (flowfabric.tag_digest(p_key, p_value), e.created_at, e.id, e.partition);
    update flowfabric.execution x
    set tags = coalesce(x.tags, '{}') || jsonb_build_object(p_key, p_value), mutated_at = flowfabric.now()
    where x.partition = p_partition and x.id = p_id;
    return true;
end;
$$;
