-- flow_eligibility: whether the dependencies of an execution are satisfied.
--
-- Roles    read, submit, work, operate
create or replace function flowfabric.flow_eligibility(p_partition integer, p_id uuid) returns text
language sql stable security definer as $$
    select coalesce((
        select case when e.completed_at is not null or e.state in ('active', 'suspended') then 'not_runnable'
                    when g.n is null or g.n = 0 or g.state = 'satisfied' then 'eligible'
                    when g.state = 'impossible' then 'impossible' else 'blocked_by_dependencies' end
        from flowfabric.execution e
        left join flowfabric.edge_group g on g.partition = e.partition and g.flow_id = e.flow_id and g.downstream = e.id
        where e.partition = p_partition and e.id = p_id), 'not_found')
$$;
