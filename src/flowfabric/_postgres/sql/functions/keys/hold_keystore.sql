-- hold_keystore: one change of the keys at a time.
create or replace function flowfabric.hold_keystore() returns void
language sql volatile as $$ select pg_advisory_xact_lock(7083, 2) $$;
