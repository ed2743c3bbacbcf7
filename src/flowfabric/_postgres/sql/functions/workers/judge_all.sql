-- judge_all: judge every route that has work, and forget the verdicts on others; returns how many changed
--
-- Called by the duty unblock. If the registry cannot be read, all verdicts are forgotten.
-- Roles    work, operate
create or replace function flowfabric.judge_all() returns integer
language plpgsql security definer as $$
declare
    v_n integer;
    v_forgotten integer;
begin
    perform flowfabric.require_read_committed();
    delete from flowfabric.uncovered u where u.route = any (array(
        select x.route from flowfabric.uncovered x join flowfabric.route r on r.id = x.route
        where not exists (select from flowfabric.first_ready(r.lane, r.id))
        order by x.route for update of x skip locked));
    get diagnostics v_forgotten = row_count;
    begin
        v_n := flowfabric.judge_routes(array(
            select r.id from flowfabric.route r
            where (r.capabilities <> '{}' or r.version is not null) and r.not_for is null
              and exists (select from flowfabric.first_ready(r.lane, r.id))));
    exception when others then
        delete from flowfabric.uncovered u where true;
        get diagnostics v_n = row_count;
    end;
    return v_n + v_forgotten;
end;
$$;
