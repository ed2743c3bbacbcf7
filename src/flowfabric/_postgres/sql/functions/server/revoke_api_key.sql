-- revoke_api_key: a key stops working, now and for good
--
-- Returns  whether there is such a key; one that was revoked before stays as it is.
-- Roles    operate
create or replace function flowfabric.revoke_api_key(p_id text) returns boolean
language plpgsql security definer as $$
begin
    perform flowfabric.require_read_committed();   -- a key it does not see would stay good
    update flowfabric.api_key k set revoked_at = coalesce(k.revoked_at, flowfabric.now()), old_digest = null, old_until = null
    where k.id = p_id;
    return found;
end;
$$;
