-- lift_verdicts: a worker has registered: lift the verdicts on what it covers
--
-- Waits for a call that judges. Called under the lock of the registration.
create or replace function flowfabric.lift_verdicts(g flowfabric.registration) returns void
language plpgsql as $$
declare
    v_routes integer[];
begin
    perform from flowfabric.deployment d for share;
    select array_agg(q.route) into v_routes
    from (select u.route from flowfabric.uncovered u
          join flowfabric.route r on r.id = u.route and r.lane = any (g.lanes)
          join flowfabric.service s on s.id = g.service
          where flowfabric.covers(s, r) and g.namespace <> all (u.served)
          order by u.route for update of u) q;
    if v_routes is null then
        return;
    elsif g.namespace = '' then
        delete from flowfabric.uncovered u where u.route = any (v_routes);
    else
        update flowfabric.uncovered u
        set served = array(select n from unnest(u.served || g.namespace) as n order by n collate "C")
        where u.route = any (v_routes);
    end if;
end;
$$;
