-- project_flows: count the members of flows again; returns how many summaries were written.
--
-- One at a time: of two counts the older must not be written last.
-- Roles    read, submit, work, operate
create or replace function flowfabric.project_flows(p_partition integer[], p_flow uuid[]) returns integer
language plpgsql security definer as $$
declare
    v_n integer;
begin
    perform flowfabric.require_read_committed();
    -- The lock keeps the flow from being deleted meanwhile, which would leave the summary behind.
    perform 1 from (select distinct u.partition, u.flow from unnest(p_partition, p_flow) as u (partition, flow)) w
    join flowfabric.flow f on f.partition = w.partition and f.flow_id = w.flow
    order by f.partition, f.flow_id for key share of f;
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
