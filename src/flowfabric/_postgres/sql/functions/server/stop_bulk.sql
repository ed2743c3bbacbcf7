-- stop_bulk: no further chunk of a bulk job is run
--
-- Locks    the job: it waits for the chunk that runs.
-- Takes    p_namespaces as list_bulk. p_failure: why it cannot continue; null: a caller stopped it.
-- Returns  the state of the job afterwards; null: there is no such job.
-- Roles    work, operate
create or replace function flowfabric.stop_bulk(p_id uuid, p_namespaces text[], p_failure text) returns text
language plpgsql security definer as $$
declare
    b flowfabric.bulk_job;
begin
    perform flowfabric.require_read_committed();
    select j.* into b from flowfabric.bulk_job j where j.id = p_id for update;
    if not found or (p_namespaces is not null and (b.namespace is null or b.namespace <> all (p_namespaces))) then
        return null;
    end if;
    if b.state <> 'running' then
        return b.state;
    end if;
    update flowfabric.bulk_job j
    set state = case when p_failure is null then 'stopped' else 'failed' end, failure = p_failure, ended_at = flowfabric.now()
    where j.id = p_id returning j.state into b.state;
    return b.state;
end;
$$;
