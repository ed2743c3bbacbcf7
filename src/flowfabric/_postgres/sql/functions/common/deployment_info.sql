-- deployment_info: facts that a client needs before its first call.
--
-- Called by every connection, by users of every role, who may not read the tables.
-- Returns  the schema's version and steps (0001_name), the build of the functions, the number of partitions, the server.
-- Roles    read, submit, work, operate
create or replace function flowfabric.deployment_info()
returns table (schema_version integer, steps text[], functions text, flow_partitions integer, server_version integer)
language sql stable security definer as $$
    select s.version, coalesce(s.steps, '{}'), (select b.functions from flowfabric.build b), d.flow_partitions,
           current_setting('server_version_num')::integer
    from flowfabric.deployment d,
         (select max(x.number) as version, array_agg(to_char(x.number, 'FM0000') || '_' || x.name order by x.number) as steps
          from flowfabric.schema_step x) s
$$;
