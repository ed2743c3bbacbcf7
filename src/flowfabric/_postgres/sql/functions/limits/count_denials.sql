-- count_denials: add what claims were denied to the totals
--
-- The duty `unblock`. Claims leave one row for each reason (move_aside).
-- Takes    p_low_water: none is left from before it.
-- Locks    the rows, skipping locked ones, then the totals, in their order.
-- Returns  the rows that were counted, oldest first: up to p_limit.
-- Roles    work, operate
create or replace function flowfabric.count_denials(p_limit integer, p_low_water timestamptz) returns setof flowfabric.denial
language plpgsql security definer as $$
declare
    v_denials flowfabric.denial[];
begin
    perform flowfabric.require_read_committed();
    with gone as (
        delete from flowfabric.denial d where d.ctid = any (array(
            select x.ctid from flowfabric.denial x where x.denied_at > coalesce(p_low_water, '-infinity')
            order by x.denied_at limit p_limit for update skip locked))
        returning d
    )
    select array_agg(g.d order by (g.d).denied_at) into v_denials from gone g;
    insert into flowfabric.denial_total as t (reason, dimension, count)
    select d.reason, d.dimension, sum(d.count) from unnest(v_denials) as d group by d.reason, d.dimension order by 1, 2
    on conflict (reason, dimension) do update set count = t.count + excluded.count;
    return query select d.* from unnest(v_denials) as d;
end;
$$;
