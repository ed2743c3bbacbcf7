-- probe_waitpoint: an early check for a bridge: unknown, mismatch, closed or ok. The delivery verifies again.
--
-- Locks    after a mismatch the execution, to record it, unless another transaction has locked it.
-- Returns  closed only to the right token, of an execution that has not ended: it may open again.
-- Roles    submit, work, operate
create or replace function flowfabric.probe_waitpoint(p_partition integer, p_id uuid, p_waitpoint uuid, p_token text) returns text
language plpgsql volatile security definer as $$
declare
    v_code text;
begin
    perform flowfabric.require_read_committed();
    v_code := coalesce((
        select case when w.is_open then case when w.is_right then 'ok' else 'mismatch' end
                    when w.is_right and exists (select from flowfabric.execution e where e.partition = p_partition
                                                and e.id = p_id and e.completed_at is null) then 'closed' end
        from (select x.state = 'active' or (x.state = 'pending' and x.expires_at > flowfabric.now()) as is_open,
                     coalesce(flowfabric.same_bytes(
                         convert_to(p_token, 'UTF8'),
                         convert_to(flowfabric.sign_token(x.token_kid, x.partition, x.id, x.waitpoint_id), 'UTF8')), false) as is_right
              from flowfabric.waitpoint x
              where x.partition = p_partition and x.waitpoint_id = p_waitpoint and x.id = p_id offset 0) w),
        'unknown');
    if v_code = 'mismatch' then
        perform flowfabric.note_bad_token(p_partition, p_id);
    end if;
    return v_code;
end;
$$;
