-- project_flows: count the members of flows again; returns how many summaries were written.
--
-- Locks    the flows, by partition and id: of two counts the older is not written last, and no flow is deleted meanwhile,
--          which would leave its summary behind.
-- Roles    work, operate
create or replace function flowfabric.project_flows(p_partition integer[], p_flow uuid[]) returns integer
language plpgsql security definer as $$
declare
    v_n integer;
begin
    perform flowfabric.require_read_committed();
    perform 1 from (select distinct u.partition, u.flow from unnest(p_partition, p_flow) as u (partition, flow)) w
    join flowfabric.flow f on f.partition = w.partition and f.flow_id = w.flow
    order by f.partition, f.flow_id for no key update of f;
    insert into flowfabric.flow_summary as s
        (partition, flow_id, state, completed, failed, cancelled, expired, skipped, active, suspended, waiting, delayed,
         rate_limited, waiting_children, updated_at)
    select c.*
    from (select distinct u.partition, u.flow from unnest(p_partition, p_flow) as u (partition, flow)) w
    join flowfabric.flow f on f.partition = w.partition and f.flow_id = w.flow
    cross join lateral flowfabric.count_members(f) c
    order by c.partition, c.flow_id
    on conflict (partition, flow_id) do update
        set state = excluded.state, completed = excluded.completed, failed = excluded.failed,
            cancelled = excluded.cancelled, expired = excluded.expired, skipped = excluded.skipped,
            active = excluded.active, suspended = excluded.suspended, waiting = excluded.waiting,
            delayed = excluded.delayed, rate_limited = excluded.rate_limited,
            waiting_children = excluded.waiting_children, updated_at = excluded.updated_at;
    get diagnostics v_n = row_count;
    return v_n;
end;
$$;
