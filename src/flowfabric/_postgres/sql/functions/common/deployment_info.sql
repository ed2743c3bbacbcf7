-- deployment_info: facts that a client needs before its first call.
--
-- Called by every connection, by users of every role, who may not read the tables. Processes of every version call it
-- first: it never changes.
-- Returns  the schema's version and steps (0001_name), the build of the functions (its digest, its version, the oldest
--          version of a process that it serves), the number of partitions, the server.
-- Roles    read, submit, work, operate
create or replace function flowfabric.deployment_info()
returns table (schema_version integer, steps text[], functions text, functions_version integer, functions_oldest integer,
               flow_partitions integer, server_version integer)
language sql stable security definer as $$
    select s.version, coalesce(s.steps, '{}'), b.functions, b.version, b.oldest, d.flow_partitions,
           current_setting('server_version_num')::integer
    from flowfabric.deployment d left join flowfabric.build b on true,
         (select max(x.number) as version, array_agg(to_char(x.number, 'FM0000') || '_' || x.name order by x.number) as steps
          from flowfabric.schema_step x) s
$$;
