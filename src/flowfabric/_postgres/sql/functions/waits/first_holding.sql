-- first_holding: the position of the first signal with which a condition holds; null if it does not.
create or replace function flowfabric.first_holding(p_condition jsonb, p_signals flowfabric.recorded) returns integer
language plpgsql immutable as $$
declare
    v_low integer := 0;                                        -- does not hold
    v_high integer := cardinality(p_signals.ids);              -- holds
    v_middle integer;
begin
    if v_high = 0 or not flowfabric.holds_at(p_condition, p_signals, v_high) then
        return null;
    end if;
    -- A further signal never makes it false again.
    while v_high - v_low > 1 loop
        v_middle := (v_low + v_high) / 2;
        if flowfabric.holds_at(p_condition, p_signals, v_middle) then
            v_high := v_middle;
        else
            v_low := v_middle;
        end if;
    end loop;
    return v_high;
end;
$$;

-- holds_at: whether the first p_upto signals satisfy a condition.
create or replace function flowfabric.holds_at(p_condition jsonb, p_signals flowfabric.recorded, p_upto integer) returns boolean
language sql immutable as $$
    select f.holds from flowfabric.satisfiers(p_condition, p_signals.keys, p_signals.names, p_signals.ids, p_signals.types,
                                              p_signals.identities, p_upto) f
$$;
