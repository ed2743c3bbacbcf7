-- read_result: the result, if the execution completed and one was given.
--
-- Roles    read, submit, work, operate
create or replace function flowfabric.read_result(p_partition integer, p_id uuid)
returns table (result bytea, result_encoding text)
language sql stable security definer as $$
    select e.result, e.result_encoding from flowfabric.execution e
    where e.partition = p_partition and e.id = p_id and e.state = 'completed' and e.result is not null
$$;
