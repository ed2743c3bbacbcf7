-- deployment_info: what a client must know before its first call.
create or replace function flowfabric.deployment_info()
returns table (schema_version integer, functions text, flow_partitions integer, server_version integer)
language sql stable security definer as $$
    select (select max(s.number) from flowfabric.schema_step s), (select b.functions from flowfabric.build b), d.flow_partitions,
           current_setting('server_version_num')::integer
    from flowfabric.deployment d
$$;
