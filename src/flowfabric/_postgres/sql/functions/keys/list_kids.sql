-- list_kids: which keys sign and verify; no secrets.
--
-- Roles    read, submit, work, operate
create or replace function flowfabric.list_kids()
returns table (kid text, state text, expires_at timestamptz)
language sql stable security definer as $$
    select k.kid, k.state, k.expires_at from flowfabric.keystore k, (select flowfabric.now() as at) n
    where k.state = 'current' or (k.state = 'verifying' and k.expires_at >= n.at)
    order by k.expires_at nulls first, k.kid
$$;
