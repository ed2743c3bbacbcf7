-- now: the only clock. Real time unless a test has moved it; never the start of the transaction.
create or replace function flowfabric.now() returns timestamptz
language sql volatile as $$
    select clock_timestamp() + shift from flowfabric.clock
$$;

-- server_time_ms: the clock, in milliseconds since the epoch.
create or replace function flowfabric.server_time_ms() returns bigint
language sql volatile security definer set search_path = flowfabric, pg_temp as $$
    select floor(extract(epoch from flowfabric.now()) * 1000)::bigint
$$;

create or replace function flowfabric.ms(p_ms double precision) returns interval
language sql immutable as $$ select p_ms * interval '1 millisecond' $$;

-- require_read_committed: what is read after a lock must be what the lock protects; a snapshot of the whole transaction
-- would be older.
create or replace function flowfabric.require_read_committed() returns void
language plpgsql as $$
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception 'this call needs a transaction at READ COMMITTED' using errcode = 'FF003';
    end if;
end;
$$;

-- far_date: a time that never comes; what waits until then waits for something else.
create or replace function flowfabric.far_date() returns timestamptz
language sql immutable as $$ select timestamptz '9999-12-31 00:00:00+00' $$;

-- The segment of the event ring that a moment belongs to: eight segments, each a quarter of the retention.
create or replace function flowfabric.event_slot(p_at timestamptz) returns smallint
language sql stable as $$
    select (floor(extract(epoch from p_at) / extract(epoch from d.event_retention / 4))::bigint % 8)::smallint
    from flowfabric.deployment d
$$;

-- server_now: the clock, for callers without rights on the tables behind it.
create or replace function flowfabric.server_now() returns timestamptz
language sql volatile security definer set search_path = flowfabric, pg_temp as $$ select flowfabric.now() $$;
