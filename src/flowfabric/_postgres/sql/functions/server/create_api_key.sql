-- create_api_key: store an API key
--
-- Takes    p_expires_at or p_expires_ms: when it stops working; neither: never.
-- Returns  ok, or api_key_exists: another key that is not revoked has this name.
-- Roles    operate
create or replace function flowfabric.create_api_key(
    p_id text, p_name text, p_digest bytea, p_scopes text[], p_namespaces text[], p_hides_payloads boolean,
    p_expires_at timestamptz, p_expires_ms bigint)
returns table (code text, created_at timestamptz, expires_at timestamptz)
language plpgsql security definer as $$
begin
    created_at := flowfabric.now();
    expires_at := coalesce(p_expires_at, created_at + flowfabric.ms(p_expires_ms));
    insert into flowfabric.api_key as k (id, name, digest, scopes, namespaces, hides_payloads, created_at, expires_at)
    values (p_id, p_name, p_digest, p_scopes, p_namespaces, p_hides_payloads, create_api_key.created_at,
            create_api_key.expires_at)
    on conflict do nothing;
    code := case when found then 'ok' else 'api_key_exists' end;
    return next;
end;
$$;
