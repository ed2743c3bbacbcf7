-- audit_flow_header: The stored facts of a flow agree with its state.
create or replace function flowfabric.audit_flow_header(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with f as (
        select x.* from flowfabric.flow x where (x.partition, x.flow_id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'flow_header', f.partition, f.flow_id, f.state from f
    where f.last_mutation_at < f.created_at or not coalesce(case f.state
        when 'open' then num_nonnulls(f.cancelled_at, f.cancel_reason, f.cancellation_policy) = 0
        when 'cancelled' then f.cancelled_at between f.created_at and f.last_mutation_at and f.cancel_reason is not null
             and f.cancellation_policy in ('cancel_all', 'cancel_pending', 'flow_only') end, false)
$$;
