-- now: the only clock. Real time unless a test has moved it; never the start of the transaction.
create or replace function flowfabric.now() returns timestamptz
language sql volatile as $$
    select clock_timestamp() + shift from flowfabric.clock
$$;

create or replace function flowfabric.ms(p_ms double precision) returns interval
language sql immutable as $$ select p_ms * interval '1 millisecond' $$;

-- far_date: a time that never comes; what waits until then waits for something else.
create or replace function flowfabric.far_date() returns timestamptz
language sql immutable as $$ select timestamptz '9999-12-31 00:00:00+00' $$;
