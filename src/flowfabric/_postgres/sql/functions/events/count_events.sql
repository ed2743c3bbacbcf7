-- count_events: how many events of each sort stand behind a number; without one, where the log ends now
--
-- Returns  one row per sort, then one row with nothing but the number up to which was counted.
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
