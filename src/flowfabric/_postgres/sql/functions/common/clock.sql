-- now: the only clock. Real time unless a test moved it; never the start of the transaction.
create or replace function flowfabric.now() returns timestamptz
language sql volatile as $$
    select clock_timestamp() + shift from flowfabric.clock
$$;

-- ms: milliseconds as an interval.
create or replace function flowfabric.ms(p_ms double precision) returns interval
language sql immutable as $$ select p_ms * interval '1 millisecond' $$;
