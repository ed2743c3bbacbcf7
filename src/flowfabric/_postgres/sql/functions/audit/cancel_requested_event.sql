-- audit_cancel_requested_event: There is one event of the cancellation of a flow, besides those that were for replayed members.
create or replace function flowfabric.audit_cancel_requested_event(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    select 'cancel_requested_event', f.partition, f.flow_id, count(v.seq)::text from flowfabric.flow f
    left join flowfabric.event v on v.flow_id = f.flow_id and v.operator_type = 'flow_cancel_requested'
        and not coalesce(v.details ? 'again', false)
    where (f.partition, f.flow_id) between (p_low, p_from) and (p_high, p_to)
    group by f.partition, f.flow_id, f.state
    having count(v.seq) <> case f.state when 'cancelled' then 1 else 0 end
$$;
