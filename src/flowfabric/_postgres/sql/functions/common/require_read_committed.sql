-- require_read_committed: a read after a lock must see what the lock protects; a snapshot of the whole transaction
-- would be older.
create or replace function flowfabric.require_read_committed() returns void
language plpgsql as $$
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception 'this call needs a transaction at READ COMMITTED' using errcode = 'FF003';
    end if;
end;
$$;
