-- release_as_operator: active -> waiting, with any lease holder; another worker continues the same attempt at once
--
-- Called by operators.
-- Locks    the execution.
-- Returns  one verdict: ok, or the reason it was refused.
-- Roles    operate
create or replace function flowfabric.release_as_operator(p_partition integer, p_id uuid)
returns setof flowfabric.verdict
language plpgsql security definer as $$
declare
    h flowfabric.held;
begin
    h := flowfabric.hold_as_operator(p_partition, p_id);
    if (h.refusal).code is not null then
        return next h.refusal;
        return;
    end if;
    return query select * from flowfabric.release(p_partition, p_id, h.lease_id, h.epoch, h.attempt_id, h.attempt_index);
end;
$$;
