-- now: the only clock. Real time unless a test moved it; never the start of the transaction.
create or replace function flowfabric.now() returns timestamptz
language sql volatile as $$
    select clock_timestamp() + shift from flowfabric.clock
$$;

-- ms: milliseconds as an interval, of 317 years at most: the time after it can be read, whatever a caller asked for.
create or replace function flowfabric.ms(p_ms double precision) returns interval
language sql immutable as $$
    select case when p_ms is not null then least(greatest(p_ms, -1e13), 1e13) end * interval '1 millisecond'
$$;
