-- read_api_key: one API key, with the digests that its secret may have
--
-- Called by servers, for a request with a key of this id; they compare the digests.
-- Returns  one row, of nulls for an id that no key has: callers do the same work for it. is_usable: neither revoked nor
--          expired.
-- Roles    operate
create or replace function flowfabric.read_api_key(p_id text)
returns table (id text, name text, digest bytea, old_digest bytea, scopes text[], namespaces text[], hides_payloads boolean,
               created_at timestamptz, expires_at timestamptz, revoked_at timestamptz, last_used_at timestamptz,
               is_usable boolean, now timestamptz)
language sql stable security definer as $$
    select k.id, k.name, k.digest, case when k.old_until > n.at then k.old_digest end, k.scopes, k.namespaces,
           k.hides_payloads, k.created_at, k.expires_at, k.revoked_at, k.last_used_at,
           k.id is not null and k.revoked_at is null and (k.expires_at is null or k.expires_at > n.at), n.at
    from (select flowfabric.now() as at) n left join flowfabric.api_key k on k.id = p_id
$$;
