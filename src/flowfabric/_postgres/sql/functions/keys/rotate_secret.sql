-- rotate_secret: sign with a new key from now on; the old one verifies for another p_grace_ms
--
-- Returns  rotated (detail: the old key, count: how many were purged), noop, or rotation_conflict.
-- Roles    owner
create or replace function flowfabric.rotate_secret(p_kid text, p_secret bytea, p_grace_ms bigint)
returns table (code text, detail text, purged integer)
language plpgsql security definer as $$
declare
    k flowfabric.keystore;
    v_now timestamptz;
begin
    perform flowfabric.require_read_committed();
    perform flowfabric.hold_keystore();
    v_now := flowfabric.now();
    select x.* into k from flowfabric.keystore x where x.kid = p_kid;
    if k.state = 'current' and flowfabric.same_bytes(k.inner_key, flowfabric.hmac_block(p_secret, 54)) then
        code := 'noop';
    elsif k.kid is not null then
        code := 'rotation_conflict';
    else
        code := 'rotated';
        update flowfabric.keystore x set state = 'verifying', expires_at = least(v_now + flowfabric.ms(p_grace_ms), flowfabric.far_date())
        where x.state = 'current' returning x.kid into detail;
        insert into flowfabric.keystore (kid, inner_key, outer_key, state, installed_at)
        values (p_kid, flowfabric.hmac_block(p_secret, 54), flowfabric.hmac_block(p_secret, 92), 'current', v_now);
        purged := flowfabric.purge_keys(v_now);
    end if;
    return next;
end;
$$;
