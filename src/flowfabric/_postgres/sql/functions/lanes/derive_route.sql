-- derive_route: the number of a route with a version, or without the code that may not run its executions; created when it
-- is new
--
-- Called by the claim that starts the first executions of a version, and by stop_changed. Claims visit such a route only if
-- it has ready rows, and take them only if the worker serves it: executions that a worker may not run cost it nothing.
-- Takes    p_version: null keeps that of p_route. p_not_for: sorted.
create or replace function flowfabric.derive_route(p_route integer, p_version integer, p_not_for text[]) returns integer
language plpgsql as $$
declare
    r flowfabric.route;
    v_digest text;
    v_id integer;
begin
    select x.* into r from flowfabric.route x where x.id = p_route;
    v_digest := concat_ws(' ', r.digest, 'version ' || p_version, 'not ' || md5(p_not_for::text));
    for v_try in 1 .. 2 loop
        select x.id into v_id from flowfabric.route x
        where x.lane = r.lane and x.kind = r.kind and x.digest = v_digest;
        exit when found or v_try = 2;
        insert into flowfabric.route (lane, kind, capabilities, limited, version, not_for, digest)
        values (r.lane, r.kind, r.capabilities, r.limited, coalesce(p_version, r.version), p_not_for, v_digest)
        on conflict do nothing;
    end loop;
    return v_id;
end;
$$;
