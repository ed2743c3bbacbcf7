-- rows_of: lock the rows of reservations, and return where they are.
--
-- A call of its own before the change: ends mark reservations without the lock of the budget (end_reservations), and a
-- marked row has moved. The fence (limit) keeps the plan on the key.
create or replace function flowfabric.rows_of(p_rows flowfabric.reservation[]) returns tid[]
language plpgsql as $$
begin
    return array(
        select f.tid from unnest(p_rows) as n
        cross join lateral (select x.ctid as tid from flowfabric.reservation x
                            where x.partition = n.partition and x.id = n.id and x.reservation_id = n.reservation_id
                              and x.budget_id = n.budget_id limit 1 for no key update) f);
end;
$$;
