-- verify_grant: ok, or exactly one reason why a grant key is invalid.
--
-- Roles    work, operate
create or replace function flowfabric.verify_grant(p_partition integer, p_id uuid, p_key text) returns text
language plpgsql security definer as $$
declare
    v_now timestamptz := flowfabric.now();
    v_part text[] := regexp_match(
        p_key, '^pg:(reclaim:)?[{]fp:([0-9]{1,5})[}]:([0-9a-f-]{36}):([0-9]{1,15}):([^:]{1,64}):([0-9a-f]{64})$');
    k flowfabric.keystore;
    g flowfabric.claim_grant;
begin
    if v_part is null or v_part[2]::integer <> p_partition or v_part[3] <> p_id::text then
        return 'malformed';
    elsif to_timestamp(v_part[4]::bigint / 1000.0) <= v_now then
        return 'expired';
    end if;
    select x.* into k from flowfabric.keystore x
    where x.kid = v_part[5] and (x.state = 'current' or (x.state = 'verifying' and x.expires_at > v_now));
    if not found then
        return 'unknown_kid';
    end if;
    select x.* into g from flowfabric.claim_grant x where x.partition = p_partition and x.id = p_id;
    if not found then
        return 'unknown_grant';
    end if;
    if not flowfabric.same_bytes(decode(v_part[6], 'hex'), flowfabric.hmac(k.inner_key, k.outer_key, convert_to(
            k.kid || ':' || flowfabric.grant_message(p_partition, p_id, g.worker_id, g.worker_instance_id,
                                                     v_part[4]::bigint,
                                                     case when v_part[1] is null then 'claim' else 'reclaim' end),
            'UTF8'))) then
        return 'signature_mismatch';
    end if;
    if p_key <> g.grant_key then
        return 'unknown_grant';   -- an earlier grant of the same worker, used or overwritten since
    end if;
    return 'ok';
end;
$$;
