-- audit_keystore: A key that signs or verifies has its halves; a retired one has none.
create or replace function flowfabric.audit_keystore(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    select 'keystore', null::integer, null::uuid, k.kid from flowfabric.keystore k
    where not case k.state when 'current' then k.expires_at is null and k.inner_key is not null
                           when 'verifying' then k.expires_at is not null and k.inner_key is not null
                           else k.inner_key is null and k.outer_key is null end
$$;
