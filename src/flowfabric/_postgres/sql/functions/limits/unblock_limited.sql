-- unblock_limited: promote what limits have room for, one page of the limits that are due, or of all that hold executions
--
-- The duty `unblock`. Limits are due when an end found them locked, when the window of a rate has room, and when a grant with
-- a slot ends. A pass over all of them every few seconds finds what a crash left behind.
-- Takes    p_limit: how many limits. p_after, p_after_key: null: those that are due; else all after this one, from
--          the first (the zero id, empty) on.
-- Locks    one policy at a time, in their order; then executions, skipping locked ones.
-- Returns  how many executions became claimable, how many limits were looked at, and the last one of a pass.
-- Roles    work, operate
create or replace function flowfabric.unblock_limited(p_limit integer, p_after uuid, p_after_key text)
returns table (promoted integer, looked integer, last_limit uuid, last_key text)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz := flowfabric.now();
    v record;
begin
    perform flowfabric.require_read_committed();
    promoted := 0; looked := 0;
    if p_after is null then
        for v in
            with due as (
                delete from flowfabric.limit_due d where d.ctid = any (array(
                    select x.ctid from flowfabric.limit_due x where x.due_at <= v_now
                    order by x.due_at limit p_limit for update skip locked))
                returning d.limit_id, d.key
            )
            select distinct d.limit_id, d.key from due d order by d.limit_id, d.key
        loop
            -- Only what holds executions has a row to lock: a new one would be waited for in any order.
            if exists (select from flowfabric.blocked b where b.limit_id = v.limit_id and b.limit_key = v.key) then
                promoted := promoted + coalesce(flowfabric.open_limit(v.limit_id, v.key, 1000, true), 0);
            end if;
            looked := looked + 1;
        end loop;
    else
        last_limit := p_after; last_key := p_after_key;
        if p_after = flowfabric.zero_uuid() then
            perform flowfabric.free_routes();
        end if;
        while looked < p_limit loop
            if looked = 0 and (p_after, p_after_key) = (flowfabric.zero_uuid(), '') then
                select b.limit_id, b.limit_key into v from flowfabric.blocked b
                where b.limit_id is not null order by b.limit_id, b.limit_key limit 1;
            else
                select b.limit_id, b.limit_key into v from flowfabric.blocked b
                where b.limit_id is not null and (b.limit_id, b.limit_key) > (last_limit, last_key)
                order by b.limit_id, b.limit_key limit 1;
            end if;
            exit when not found;
            last_limit := v.limit_id; last_key := v.limit_key;
            promoted := promoted + coalesce(flowfabric.open_limit(v.limit_id, v.limit_key, 1000, true), 0);
            looked := looked + 1;
        end loop;
    end if;
    return next;
end;
$$;
