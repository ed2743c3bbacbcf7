-- read_waitpoint_token: the token of a waitpoint that still accepts signals, or null.
--
-- Roles    operate
create or replace function flowfabric.read_waitpoint_token(p_partition integer, p_waitpoint uuid) returns text
language sql stable security definer as $$
    select flowfabric.sign_token(w.token_kid, w.partition, w.id, w.waitpoint_id) from flowfabric.waitpoint w
    where w.partition = p_partition and w.waitpoint_id = p_waitpoint
      and (w.state = 'active' or (w.state = 'pending' and w.expires_at > flowfabric.now()))
$$;
