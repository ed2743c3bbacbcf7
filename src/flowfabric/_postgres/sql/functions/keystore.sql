-- The signing keys of the deployment. A secret is stored only as the two padded blocks that HMAC-SHA-256 hashes, and
-- no function that a worker may call returns them.

-- hmac_block: the secret, padded to 64 bytes and xor-ed with one byte value: 54 (inner) or 92 (outer).
create or replace function flowfabric.hmac_block(p_secret bytea, p_pad integer) returns bytea
language plpgsql immutable strict as $$
declare
    v_block bytea := case when length(p_secret) > 64 then sha256(p_secret) else p_secret end;
begin
    v_block := v_block || decode(repeat('00', 64 - length(v_block)), 'hex');
    for i in 0 .. 63 loop
        v_block := set_byte(v_block, i, get_byte(v_block, i) # p_pad);
    end loop;
    return v_block;
end;
$$;

-- hmac: HMAC-SHA-256 from a stored key's blocks.
create or replace function flowfabric.hmac(p_inner bytea, p_outer bytea, p_message bytea) returns bytea
language sql immutable strict as $$ select sha256(p_outer || sha256(p_inner || p_message)) $$;

-- same_bytes: compare without telling by the time taken where the first difference lies.
create or replace function flowfabric.same_bytes(p_a bytea, p_b bytea) returns boolean
language sql immutable strict as $$ select sha256(p_a || sha256(p_b)) = sha256(p_b || sha256(p_a)) and sha256(p_a) = sha256(p_b) $$;

-- seed_keystore: a first key, so that nothing needs an operator. Called by migrate; does nothing when one exists.
create or replace function flowfabric.seed_keystore() returns void
language plpgsql as $$
declare
    v_secret bytea := sha256(uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()));
begin
    insert into flowfabric.keystore (kid, inner_key, outer_key, state, installed_at)
    select 'k1', flowfabric.hmac_block(v_secret, 54), flowfabric.hmac_block(v_secret, 92), 'current', flowfabric.now()
    where not exists (select from flowfabric.keystore)
    on conflict do nothing;
end;
$$;
