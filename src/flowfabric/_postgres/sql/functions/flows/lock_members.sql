-- lock_members: lock executions of one partition, by id.
create or replace function flowfabric.lock_members(p_partition integer, p_id uuid[]) returns void
language plpgsql as $$
begin
    perform 1 from (select distinct u.id from unnest(p_id) u (id) order by u.id) n
    cross join lateral (select 1 from flowfabric.execution x where x.partition = p_partition and x.id = n.id
                        offset 0 for no key update) e;
end;
$$;
