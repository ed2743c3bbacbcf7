-- needed_by: the execution that still needs the result of a child or of a flow; null if none does.
--
-- That is the parent, as long as it is stored and has not recorded the result for good.
-- Takes    the parent, or null, and the name of the step that has the result.
create or replace function flowfabric.needed_by(p_parent uuid, p_name text) returns flowfabric.execution
language sql stable as $$
    select e.* from flowfabric.execution e
    where e.partition = flowfabric.partition_of(p_parent, (select d.flow_partitions from flowfabric.deployment d))
      and e.id = p_parent
      and not exists (select from flowfabric.step s
                      where s.partition = e.partition and s.id = e.id and s.generation = e.generation and s.kind = 'result'
                        and s.name = p_name and s.error is null)
$$;

-- kept_for: who needs the result of a child or of a flow, in words; null if it may be deleted or redacted.
--
-- A completed parent does not read it again, nor can one that is redacted, once it has ended.
create or replace function flowfabric.kept_for(p_parent uuid, p_name text) returns text
language sql stable as $$
    select n.id || ' (' || n.state || ')' from flowfabric.needed_by(p_parent, p_name) n
    where n.state <> 'completed'
      and not (n.completed_at is not null and n.payload_encoding is not distinct from 'redacted' and n.payload = '')
$$;

-- result_step: the name of the step in which a handler records the result of a child.
create or replace function flowfabric.result_step(p_id uuid) returns text
language sql immutable as $$ select 'result ' || p_id $$;

-- flow_result_step: the name of the step in which a handler records the results of a flow.
create or replace function flowfabric.flow_result_step(p_flow uuid) returns text
language sql immutable as $$ select 'result of flow ' || p_flow $$;
