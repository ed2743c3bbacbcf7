-- cascade_pending: whether an event is still to be dispatched.
--
-- Roles    work, operate
create or replace function flowfabric.cascade_pending(p_event bigint) returns boolean
language sql stable security definer as $$
    select exists (select from flowfabric.pending_cascade p where p.seq = p_event)
$$;
