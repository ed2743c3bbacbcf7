-- sign_token: the token of a waitpoint.
create or replace function flowfabric.sign_token(p_kid text, p_partition integer, p_id uuid, p_waitpoint uuid) returns text
language sql stable as $$
    select p_kid || ':' || flowfabric.token_digest(p_kid, p_partition, p_id, p_waitpoint)
$$;

-- token_digest: the part of a token after its kid; null if the key is unknown or erased.
create or replace function flowfabric.token_digest(p_kid text, p_partition integer, p_id uuid, p_waitpoint uuid) returns text
language sql stable as $$
    select encode(flowfabric.hmac(k.inner_key, k.outer_key, convert_to(
               p_kid || ':{fp:' || p_partition || '}:' || p_id || ':' || p_waitpoint, 'UTF8')), 'hex')
    from flowfabric.keystore k where k.kid = p_kid
$$;
