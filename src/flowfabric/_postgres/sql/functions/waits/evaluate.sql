-- evaluate: whether the signals recorded on pending waitpoints satisfy a condition
--
-- Called by suspend and settle_wait, under the lock of the execution. Changes nothing.
-- Returns  the signals; the position of the one with which the condition began to hold (null: it does not hold); and the
--          positions of the signals that count for it.
create or replace function flowfabric.evaluate(
    p_partition integer, p_waitpoints uuid[], p_condition jsonb,
    out signals flowfabric.recorded, out closer integer, out places integer[])
language plpgsql as $$
begin
    places := '{}';
    if cardinality(p_waitpoints) > 0 then
        signals := flowfabric.recorded_on(p_partition, p_waitpoints, false);
        closer := flowfabric.first_holding(p_condition, signals);
        select f.places into places
        from flowfabric.satisfiers(p_condition, signals.keys, signals.names, signals.ids, signals.types, signals.identities,
                                   coalesce(closer, cardinality(signals.ids))) f;
    end if;
end;
$$;
