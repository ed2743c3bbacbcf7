-- seed_keystore: create the first key, so that no operator has to. Called by migrate; does nothing if one exists.
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
