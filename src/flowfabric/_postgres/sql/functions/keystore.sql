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

-- hold_keystore: one change of the keys at a time.
create or replace function flowfabric.hold_keystore() returns void
language sql volatile as $$ select pg_advisory_xact_lock(7083, 2) $$;

-- purge_keys: erase the secrets whose grace is over; answers how many. The names stay, so that none is used twice.
create or replace function flowfabric.purge_keys(p_now timestamptz) returns integer
language plpgsql as $$
declare
    v_n integer;
begin
    update flowfabric.keystore k set state = 'retired', inner_key = null, outer_key = null, expires_at = null
    where k.state = 'verifying' and k.expires_at < p_now;
    get diagnostics v_n = row_count;
    return v_n;
end;
$$;

-- seed_secret: install a first key; never replaces one
--
-- Answers  seeded, already_seeded (detail: whether the secret is the same), or other_kid with the current one.
create or replace function flowfabric.seed_secret(p_kid text, p_secret bytea)
returns table (code text, detail text)
language plpgsql security definer set search_path = flowfabric, pg_temp as $$
declare
    k flowfabric.keystore;
    v_current text;
begin
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

-- rotate_secret: sign with another key from now on; the one before verifies for p_grace_ms more
--
-- Answers  rotated (detail: the key before, count: how many were purged), noop, or rotation_conflict.
create or replace function flowfabric.rotate_secret(p_kid text, p_secret bytea, p_grace_ms bigint)
returns table (code text, detail text, purged integer)
language plpgsql security definer set search_path = flowfabric, pg_temp as $$
declare
    k flowfabric.keystore;
    v_now timestamptz;
begin
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

-- list_kids: which keys sign and verify; no secrets.
create or replace function flowfabric.list_kids()
returns table (kid text, state text, expires_at timestamptz)
language sql stable security definer set search_path = flowfabric, pg_temp as $$
    select k.kid, k.state, k.expires_at from flowfabric.keystore k, (select flowfabric.now() as at) n
    where k.state = 'current' or (k.state = 'verifying' and k.expires_at >= n.at)
    order by k.expires_at nulls first, k.kid
$$;

-- token_digest: what a token says behind its kid; null when the key is unknown or erased.
create or replace function flowfabric.token_digest(p_kid text, p_partition integer, p_id uuid, p_waitpoint uuid) returns text
language sql stable as $$
    select encode(flowfabric.hmac(k.inner_key, k.outer_key, convert_to(
               p_kid || ':{fp:' || p_partition || '}:' || p_id || ':' || p_waitpoint, 'UTF8')), 'hex')
    from flowfabric.keystore k where k.kid = p_kid
$$;

-- sign_token: the token of a waitpoint.
create or replace function flowfabric.sign_token(p_kid text, p_partition integer, p_id uuid, p_waitpoint uuid) returns text
language sql stable as $$
    select p_kid || ':' || flowfabric.token_digest(p_kid, p_partition, p_id, p_waitpoint)
$$;

-- check_token: what is wrong with a token, or null.
--
-- Takes no lock and reads what never changes. Whatever is unknown gets one answer after the same work: a digest is
-- computed and compared in any case, with a key of nobody's if there is none.
create or replace function flowfabric.check_token(p_partition integer, p_id uuid, p_waitpoint uuid, p_token text)
returns text
language plpgsql stable as $$
begin
    return (
        select case when coalesce(p_token, '') = '' then 'missing_token'
                    when t.kid = '' or length(t.kid) = length(p_token) or t.digest !~ '^[0-9a-f]{64}$' then 'invalid_token'
                    when not t.is_known or not t.is_same then 'invalid_token'
                    when t.state = 'current' or (t.state = 'verifying' and t.expires_at >= flowfabric.now()) then null
                    else 'token_expired' end
        from (select g.kid, g.digest, k.state, k.expires_at,
                     k.inner_key is not null and exists (
                         select from flowfabric.waitpoint w where w.partition = p_partition
                         and w.waitpoint_id = p_waitpoint and w.id = p_id and w.token_kid = g.kid) as is_known,
                     flowfabric.same_bytes(
                         convert_to(g.digest, 'UTF8'),
                         convert_to(encode(flowfabric.hmac(
                             coalesce(k.inner_key, decode(repeat('36', 64), 'hex')),
                             coalesce(k.outer_key, decode(repeat('5c', 64), 'hex')),
                             convert_to(g.kid || ':{fp:' || p_partition || '}:' || p_id || ':' || p_waitpoint, 'UTF8')),
                             'hex'), 'UTF8')) as is_same
              from (select split_part(p_token, ':', 1) as kid, substr(p_token, strpos(p_token, ':') + 1) as digest) g
              left join flowfabric.keystore k on k.kid = g.kid
              offset 0) t);   -- the fence: both are computed, whichever of them decides
end;
$$;
