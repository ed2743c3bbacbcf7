-- open_budgets: budgets have more room than before; executions that they held back and that fit now become claimable
--
-- Called under the exclusive locks of the budgets. A paused execution that another budget still denies waits for that one
-- from now on, if its lock can be had at once; otherwise the duty finds it.
-- Locks    executions, skipping locked ones.
create or replace function flowfabric.open_budgets(p_ids uuid[], p_now timestamptz) returns void
language plpgsql as $$
declare
    v_id uuid;
    v_other uuid;
    b record;
begin
    foreach v_id in array p_ids loop
        continue when not exists (select from flowfabric.blocked x where x.limit_id = v_id and x.limit_key = '');
        if not exists (select from flowfabric.exhausted_budgets(array[v_id])) then
            perform flowfabric.promote_limited(v_id, null, 1000, null, null, null, p_now);
        end if;
        for b in
            select x.ctid as tid, x.needs, flowfabric.budgets_of(e) as budgets
            from flowfabric.blocked x join flowfabric.execution e on e.partition = x.partition and e.id = x.id
            where x.limit_id = v_id and x.limit_key = '' and x.needs is not null
            order by x.rank, x.created_at, x.id limit 100 for update of x skip locked
        loop
            v_other := flowfabric.denying_budget(b.budgets, b.needs);
            continue when v_other is null or v_other = v_id;
            if v_other = any (p_ids) or v_other = any (flowfabric.hold_budgets(array[v_other], false)) then
                if v_other = flowfabric.denying_budget(b.budgets, b.needs) then
                    update flowfabric.blocked x set limit_id = v_other where x.ctid = b.tid;
                end if;
            end if;
        end loop;
    end loop;
end;
$$;
