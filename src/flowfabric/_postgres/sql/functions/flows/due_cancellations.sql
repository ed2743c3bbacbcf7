-- due_cancellations: cancelled flows past their grace with members still to cancel, oldest first.
--
-- Takes    p_low_water: none is left whose grace ended before it.
-- Returns  with each: how many cancelled flows there are, also within their grace, that have members left.
-- Roles    work, operate
create or replace function flowfabric.due_cancellations(p_limit integer, p_low_water timestamptz)
returns table (partition integer, flow_id uuid, backlog bigint)
language sql volatile security definer as $$
    select b.partition, b.flow_id, (select count(*) from flowfabric.cancel_backlog) from flowfabric.cancel_backlog b
    where b.grace_until > coalesce(p_low_water, '-infinity') and b.grace_until <= flowfabric.now() order by b.grace_until limit p_limit
$$;
