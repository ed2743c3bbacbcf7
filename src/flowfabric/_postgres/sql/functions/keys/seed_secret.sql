-- seed_secret: install the first key; never replaces one
--
-- Returns  seeded, already_seeded (detail: whether the secret is the same), or other_kid with the current one.
-- Roles    owner
create or replace function flowfabric.seed_secret(p_kid text, p_secret bytea)
returns table (code text, detail text)
language plpgsql security definer as $$
declare
    k flowfabric.keystore;
    v_current text;
begin
    perform flowfabric.require_read_committed();
    perform flowfabric.hold_keystore();
    select x.* into k from flowfabric.keystore x where x.kid = p_kid and x.state in ('current', 'verifying');
    select x.kid into v_current from flowfabric.keystore x where x.state = 'current';
    if k.kid is not null then
        code := 'already_seeded';
        detail := flowfabric.same_bytes(k.inner_key, flowfabric.hmac_block(p_secret, 54))::text;
    elsif v_current is not null or exists (select from flowfabric.keystore x where x.kid = p_kid) then
        code := 'other_kid'; detail := v_current;
    else
        insert into flowfabric.keystore (kid, inner_key, outer_key, state, installed_at)
        values (p_kid, flowfabric.hmac_block(p_secret, 54), flowfabric.hmac_block(p_secret, 92), 'current', flowfabric.now());
        code := 'seeded';
    end if;
    return next;
end;
$$;
