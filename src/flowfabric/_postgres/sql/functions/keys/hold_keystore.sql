-- hold_keystore: one change of the keys at a time. Signing and verifying only read, and do not wait.
--
-- A lock of the table, not an advisory lock: every role that can connect can take those.
create or replace function flowfabric.hold_keystore() returns void
language plpgsql as $$
begin
    lock table flowfabric.keystore in share row exclusive mode;
end;
$$;
