-- finish_cancel: cancel all members of a closed flow that still have to be, now.
--
-- Waits for no lock: fails with serialization_failure if a member, or the backlog, is locked, and the caller tries again.
create or replace function flowfabric.finish_cancel(p_partition integer, p_flow uuid) returns void
language plpgsql as $$
declare
    v_after uuid;
    v_left integer;
    v_busy boolean;
begin
    loop
        select c.remaining, c.last, c.busy into v_left, v_after, v_busy
        from flowfabric.cancel_members(p_partition, p_flow, 1000, v_after) c;
        exit when v_left = 0;
        if v_busy or v_after is null then
            raise exception 'flow % is being cancelled', p_flow using errcode = 'serialization_failure';
        end if;
    end loop;
end;
$$;
