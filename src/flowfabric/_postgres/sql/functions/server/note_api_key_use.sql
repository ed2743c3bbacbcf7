-- note_api_key_use: remember that a key was used now, at most once a minute
--
-- Roles    operate
create or replace function flowfabric.note_api_key_use(p_id text) returns timestamptz
language plpgsql security definer as $$
declare
    v_now timestamptz := flowfabric.now();
begin
    update flowfabric.api_key k set last_used_at = v_now
    where k.id = p_id and (k.last_used_at is null or k.last_used_at <= v_now - interval '1 minute');
    return v_now;
end;
$$;
