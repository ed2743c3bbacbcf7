-- covers: whether a worker that serves this can run the executions of a route of its lanes, alone.
create or replace function flowfabric.covers(s flowfabric.service, r flowfabric.route) returns boolean
language sql stable as $$
    select (s.kinds is null or r.kind = any (s.kinds)) and r.capabilities <@ s.capabilities
       and ((r.version is null and r.not_for is null) or (s.kinds is null and r.not_for is null)
            or flowfabric.serves(s.id, r.kind, r.version, r.not_for))
$$;
