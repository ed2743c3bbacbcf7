-- rotate_api_key: give a key another secret; the one before works for another p_grace_ms
--
-- Returns  ok and the name of the key, not_found, or api_key_revoked.
-- Roles    operate
create or replace function flowfabric.rotate_api_key(p_id text, p_digest bytea, p_grace_ms bigint)
returns table (code text, name text)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    k flowfabric.api_key;
    v_now timestamptz;
begin
    perform flowfabric.require_read_committed();
    select x.* into k from flowfabric.api_key x where x.id = p_id for update;
    v_now := flowfabric.now();
    code := case when k.id is null then 'not_found' when k.revoked_at is not null then 'api_key_revoked' else 'ok' end;
    name := k.name;
    if code = 'ok' then
        update flowfabric.api_key x
        set digest = p_digest, old_digest = case when p_grace_ms > 0 then k.digest end,
            old_until = case when p_grace_ms > 0 then v_now + flowfabric.ms(p_grace_ms) end
        where x.id = p_id;
    end if;
    return next;
end;
$$;
