-- list_api_keys: API keys, newest first; never their digests
--
-- Takes    p_usable: only those that work; the position after which to continue, or null.
-- Roles    operate
create or replace function flowfabric.list_api_keys(
    p_usable boolean, p_before_at timestamptz, p_before_id text, p_limit integer)
returns table (id text, name text, scopes text[], namespaces text[], hides_payloads boolean, created_at timestamptz,
               expires_at timestamptz, revoked_at timestamptz, last_used_at timestamptz)
language sql stable security definer as $$
    select k.id, k.name, k.scopes, k.namespaces, k.hides_payloads, k.created_at, k.expires_at, k.revoked_at, k.last_used_at
    from flowfabric.api_key k, (select flowfabric.now() as at) n
    where (k.created_at, k.id) < (coalesce(p_before_at, 'infinity'), coalesce(p_before_id, ''))
      and (not p_usable or (k.revoked_at is null and (k.expires_at is null or k.expires_at > n.at)))
    order by k.created_at desc, k.id desc limit p_limit
$$;
