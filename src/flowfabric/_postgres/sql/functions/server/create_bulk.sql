-- create_bulk: cancel or replay everything that matches, from now on, in chunks
--
-- The duty bulk_work runs it. Executions created later are left out.
-- Takes    an id, so that a repeated call makes one job; the filter as `find` takes it.
-- Returns  whether the job is new.
-- Roles    operate
create or replace function flowfabric.create_bulk(
    p_id uuid, p_operation text, p_reason text, p_actor text, p_key text, p_namespace text, p_lanes text[], p_kinds text[],
    p_states text[], p_tag_key text, p_tag_value text, p_flow uuid, p_parent uuid, p_from timestamptz, p_to timestamptz)
returns boolean
language plpgsql security definer as $$
declare
    v_now timestamptz := flowfabric.now();
begin
    insert into flowfabric.bulk_job (id, operation, state, reason, actor, key_id, created_at, namespace, lanes, kinds, states,
                                     tag_key, tag_value, flow_id, parent_id, created_from, created_before)
    values (p_id, p_operation, 'running', p_reason, p_actor, p_key, v_now, p_namespace, p_lanes, p_kinds, p_states,
            p_tag_key, p_tag_value, p_flow, p_parent, p_from, least(p_to, v_now))
    on conflict (id) do nothing;
    return found;
end;
$$;
