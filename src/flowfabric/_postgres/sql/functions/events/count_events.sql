-- count_events: how many events of each type follow a number; without one, only the current end of the log
--
-- Returns  one row per type, then one row with only the number up to which it counted.
create or replace function flowfabric.count_events(p_after bigint)
returns table (seq bigint, lease_type text, outcome text, operator_type text, signal_effect text, n bigint)
language plpgsql volatile security definer as $$
#variable_conflict use_column
declare
    v_upto bigint := flowfabric.log_end();
begin
    if p_after is not null then
        return query
        select null::bigint, e.lease_type, e.outcome, e.operator_type, e.signal_effect, count(*)
        from flowfabric.event e where e.seq > p_after and e.seq <= v_upto
        group by e.lease_type, e.outcome, e.operator_type, e.signal_effect;
    end if;
    seq := greatest(v_upto, p_after);
    return next;
end;
$$;
