-- The signing keys of the deployment. A secret is stored only as the two padded blocks that HMAC-SHA-256 hashes, and
-- no function that a worker may call returns them.

-- hmac: HMAC-SHA-256 from a stored key's blocks.
create or replace function flowfabric.hmac(p_inner bytea, p_outer bytea, p_message bytea) returns bytea
language sql immutable strict as $$ select sha256(p_outer || sha256(p_inner || p_message)) $$;

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

-- same_bytes: compare in constant time, so that timing does not reveal the first difference. Null with null. Not declared
-- strict: then it could not be inlined.
create or replace function flowfabric.same_bytes(p_a bytea, p_b bytea) returns boolean
language sql immutable as $$ select sha256(p_a || sha256(p_b)) = sha256(p_b || sha256(p_a)) and sha256(p_a) = sha256(p_b) $$;
