-- evaluate: evaluate a condition with the signals recorded on pending waitpoints
--
-- Called by suspend and settle_wait, under the lock of the execution. Changes nothing.
-- Returns  the signals; their satisfiers (see there), all null if there are no such waitpoints.
create or replace function flowfabric.evaluate(
    p_partition integer, p_waitpoints uuid[], p_condition jsonb,
    out signals flowfabric.recorded, out weighed flowfabric.weighed)
language plpgsql as $$
begin
    if cardinality(p_waitpoints) > 0 then
        signals := flowfabric.recorded_on(p_partition, p_waitpoints, false);
        weighed := flowfabric.satisfiers(p_condition, signals);
    end if;
end;
$$;
