-- Reading flows: headers, groups, edges, lists, tags, and the counted summary.

-- describe_flow: the header of a flow, and as columns its groups: one per member with a staged edge into it, by id.
create or replace function flowfabric.describe_flow(p_partition integer, p_flow uuid)
returns table (flow_id uuid, flow_kind text, namespace text, state text, node_count integer, edge_count integer,
               created_at timestamptz, last_mutation_at timestamptz, cancelled_at timestamptz, cancel_reason text,
               cancellation_policy text, tags jsonb, downstreams uuid[], policies text[], ks integer[],
               cancel_rests boolean[], ns integer[], succeededs integer[], faileds integer[], skippeds integer[],
               states text[], satisfied_ats timestamptz[])
language sql stable security definer set search_path = flowfabric, pg_temp as $$
    select f.flow_id, f.flow_kind, f.namespace, f.state, f.node_count, f.edge_count, f.created_at, f.last_mutation_at,
           f.cancelled_at, f.cancel_reason, f.cancellation_policy, f.tags, g.*
    from flowfabric.flow f
    cross join lateral (
        select array_agg(d.downstream order by d.downstream), array_agg(coalesce(g.policy, 'all_of') order by d.downstream),
               array_agg(g.k order by d.downstream), array_agg(coalesce(g.cancel_rest, false) order by d.downstream),
               array_agg(coalesce(g.n, 0) order by d.downstream), array_agg(coalesce(g.succeeded, 0) order by d.downstream),
               array_agg(coalesce(g.failed, 0) order by d.downstream), array_agg(coalesce(g.skipped, 0) order by d.downstream),
               array_agg(coalesce(g.state, 'pending') order by d.downstream), array_agg(g.satisfied_at order by d.downstream)
        from (select distinct x.downstream from flowfabric.edge x where x.partition = p_partition and x.flow_id = p_flow) d
        left join lateral (select x.* from flowfabric.edge_group x where x.partition = p_partition and x.flow_id = p_flow
                           and x.downstream = d.downstream offset 0) g on true) g
    where f.partition = p_partition and f.flow_id = p_flow
$$;

-- read_edges: the edges of a flow, of one side of a member, or one of them, by id.
create or replace function flowfabric.read_edges(
    p_partition integer, p_flow uuid, p_upstream uuid, p_downstream uuid, p_edge uuid)
returns setof flowfabric.edge
language plpgsql stable security definer set search_path = flowfabric, pg_temp as $$
begin
    if p_edge is not null then
        return query select d.* from flowfabric.edge d
        where d.partition = p_partition and d.flow_id = p_flow and d.edge_id = p_edge;
    elsif p_upstream is not null then
        return query select d.* from flowfabric.edge d
        where d.partition = p_partition and d.upstream = p_upstream and d.flow_id = p_flow order by d.edge_id;
    elsif p_downstream is not null then
        return query select d.* from flowfabric.edge d
        where d.partition = p_partition and d.downstream = p_downstream and d.flow_id = p_flow order by d.edge_id;
    else
        return query select d.* from flowfabric.edge d
        where d.partition = p_partition and d.flow_id = p_flow order by d.edge_id;
    end if;
end;
$$;

-- read_members: the members of a flow as a picture or a list of results shows them, in the order they were made.
create or replace function flowfabric.read_members(p_flow uuid, p_results boolean)
returns table (partition integer, id uuid, node text, kind text, state text, created_at timestamptz, started_at timestamptz,
               completed_at timestamptz, failure_reason text, failure_category text, cancellation_reason text,
               result bytea, result_encoding text)
language sql stable security definer set search_path = flowfabric, pg_temp as $$
    select e.partition, e.id, e.node, r.kind, e.state, e.created_at, e.started_at, e.completed_at, e.failure_reason,
           e.failure_category, e.cancellation_reason, case when p_results then e.result end, e.result_encoding
    from flowfabric.execution e join flowfabric.route r on r.id = e.route
    where e.flow_id = p_flow order by e.created_at, e.id
$$;

-- list_flows: the flows of a partition by id, or of all partitions by time, newest first
--
-- Takes    p_partition and p_after: behind this id. Else p_before and p_before_id: older than this.
create or replace function flowfabric.list_flows(
    p_partition integer, p_after uuid, p_before timestamptz, p_before_id uuid, p_namespace text, p_kind text, p_limit integer)
returns table (partition integer, flow_id uuid, created_at timestamptz, state text, summary text, flow_kind text,
               namespace text, node_count integer)
language plpgsql stable security definer set search_path = flowfabric, pg_temp as $$
begin
    if p_partition is not null then
        return query
        select f.partition, f.flow_id, f.created_at, f.state, s.state, f.flow_kind, f.namespace, f.node_count
        from flowfabric.flow f left join flowfabric.flow_summary s on s.partition = f.partition and s.flow_id = f.flow_id
        where f.partition = p_partition and (p_after is null or f.flow_id > p_after)
        order by f.flow_id limit p_limit;
    else
        return query
        select f.partition, f.flow_id, f.created_at, f.state, s.state, f.flow_kind, f.namespace, f.node_count
        from flowfabric.flow f left join flowfabric.flow_summary s on s.partition = f.partition and s.flow_id = f.flow_id
        where (p_before is null or (f.created_at, f.flow_id) < (p_before, p_before_id))
          and (p_namespace is null or f.namespace = p_namespace) and (p_kind is null or f.flow_kind = p_kind)
        order by f.created_at desc, f.flow_id desc limit p_limit;
    end if;
end;
$$;

-- set_flow_tags: add tags to a flow or replace their values; answers whether there is such a flow.
create or replace function flowfabric.set_flow_tags(p_partition integer, p_flow uuid, p_tags text) returns boolean
language plpgsql security definer set search_path = flowfabric, pg_temp as $$
begin
    update flowfabric.flow f set tags = f.tags || p_tags::jsonb, last_mutation_at = flowfabric.now()
    where f.partition = p_partition and f.flow_id = p_flow;
    return found;
end;
$$;

-- read_flow_tags: the tags of a flow; no row for an unknown one.
create or replace function flowfabric.read_flow_tags(p_partition integer, p_flow uuid) returns table (tags jsonb)
language sql stable security definer set search_path = flowfabric, pg_temp as $$
    select f.tags from flowfabric.flow f where f.partition = p_partition and f.flow_id = p_flow
$$;

-- flow_eligibility: what the dependencies of an execution say about it.
create or replace function flowfabric.flow_eligibility(p_partition integer, p_id uuid) returns text
language sql stable security definer set search_path = flowfabric, pg_temp as $$
    select coalesce((
        select case when e.completed_at is not null or e.state in ('active', 'suspended') then 'not_runnable'
                    when g.n is null or g.n = 0 or g.state = 'satisfied' then 'eligible'
                    when g.state = 'impossible' then 'impossible' else 'blocked_by_dependencies' end
        from flowfabric.execution e
        left join flowfabric.edge_group g on g.partition = e.partition and g.flow_id = e.flow_id and g.downstream = e.id
        where e.partition = p_partition and e.id = p_id), 'not_found')
$$;

-- count_members: the summary of a flow as its members are now; no row when it has none.
create or replace function flowfabric.count_members(f flowfabric.flow) returns setof flowfabric.flow_summary
language sql volatile as $$
    select f.partition, f.flow_id,
           case when c.live = 0 and f.state = 'cancelled' then 'cancelled'
                when c.live = 0 and (c.failed > 0 or c.expired > 0 or c.stopped > 0) then 'failed'
                when c.live = 0 then 'completed'
                when c.active > 0 then 'running'
                when c.suspended + c.delayed + c.rate_limited + c.waiting_children > 0 then 'blocked'
                else 'open' end,
           c.completed, c.failed, c.cancelled, c.expired, c.skipped, c.active, c.suspended, c.waiting, c.delayed,
           c.rate_limited, c.waiting_children, flowfabric.now()
    from (
        select count(*) as total, count(*) filter (where e.completed_at is null) as live,
               count(*) filter (where e.state = 'completed')::integer as completed,
               count(*) filter (where e.state = 'failed')::integer as failed,
               count(*) filter (where e.state = 'cancelled')::integer as cancelled,
               count(*) filter (where e.state = 'cancelled' and coalesce(e.cancellation_reason, '') not in
                   ('sibling_quorum_satisfied', 'sibling_quorum_impossible')) as stopped,
               count(*) filter (where e.state = 'expired')::integer as expired,
               count(*) filter (where e.state = 'skipped')::integer as skipped,
               count(*) filter (where e.state = 'active')::integer as active,
               count(*) filter (where e.state = 'suspended')::integer as suspended,
               count(*) filter (where e.state in ('waiting', 'resumable'))::integer as waiting,
               count(*) filter (where e.state = 'delayed')::integer as delayed,
               count(*) filter (where e.state = 'rate_limited')::integer as rate_limited,
               count(*) filter (where e.state = 'waiting_children')::integer as waiting_children
        from flowfabric.execution e where e.flow_id = f.flow_id) c
    where c.total > 0
$$;

-- project_flows: count the members of flows anew; answers how many summaries were written.
--
-- One at a time: of two counts the older must not be written last.
create or replace function flowfabric.project_flows(p_partition integer[], p_flow uuid[]) returns integer
language plpgsql security definer set search_path = flowfabric, pg_temp as $$
declare
    v_n integer;
begin
    -- Against being forgotten meanwhile, which would leave the summary behind.
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

-- project_touched: count the flows that changed since they were last counted; a bounded number of marks at a time
--
-- Answers  how many flows were counted, and whether there are more marks.
create or replace function flowfabric.project_touched(p_limit integer) returns table (counted integer, more boolean)
language plpgsql security definer set search_path = flowfabric, pg_temp as $$
declare
    v_partitions integer[]; v_flows uuid[];
    v_n integer;
begin
    perform flowfabric.require_read_committed();
    if not pg_try_advisory_xact_lock(708304, 0) then
        counted := 0; more := false;   -- somebody is at it
        return next;
        return;
    end if;
    -- The marks go in a statement before the count: what changes later leaves a new one.
    with taken as (
        delete from flowfabric.flow_touched t using (
            select x.ctid as tid from flowfabric.flow_touched x limit p_limit for update skip locked) old
        where t.ctid = old.tid returning t.partition, t.flow_id
    )
    select array_agg(d.partition), array_agg(d.flow_id), sum(d.n) into v_partitions, v_flows, v_n
    from (select t.partition, t.flow_id, count(*) as n from taken t group by 1, 2) d;
    counted := 0; more := coalesce(v_n, 0) >= p_limit;
    if v_flows is not null then
        counted := flowfabric.project_flows(v_partitions, v_flows);
    end if;
    return next;
end;
$$;

-- read_summary: the counted members of a flow.
create or replace function flowfabric.read_summary(p_partition integer, p_flow uuid) returns setof flowfabric.flow_summary
language sql stable security definer set search_path = flowfabric, pg_temp as $$
    select s.* from flowfabric.flow_summary s where s.partition = p_partition and s.flow_id = p_flow
$$;

-- flow_progress: whether every member of a flow has ended, and how the flow stands; no row without such a flow.
create or replace function flowfabric.flow_progress(p_partition integer, p_flow uuid)
returns table (members integer, live integer, state text)
language sql stable security definer set search_path = flowfabric, pg_temp as $$
    select f.node_count, (select count(*)::integer from flowfabric.execution e where e.flow_id = p_flow and e.completed_at is null),
           f.state
    from flowfabric.flow f where f.partition = p_partition and f.flow_id = p_flow
$$;

-- delete_flow: forget a flow and its members, when all of them have ended
--
-- Locks    the flow, then its groups and its members, by id.
-- Answers  ok, flow_not_found, or flow_not_terminal.
create or replace function flowfabric.delete_flow(p_partition integer, p_flow uuid) returns text
language plpgsql security definer set search_path = flowfabric, pg_temp as $$
begin
    perform 1 from flowfabric.flow f where f.partition = p_partition and f.flow_id = p_flow for update;
    if not found then
        return 'flow_not_found';
    end if;
    perform 1 from flowfabric.edge_group g where g.partition = p_partition and g.flow_id = p_flow order by g.downstream for update;
    perform 1 from flowfabric.execution e where e.flow_id = p_flow order by e.id for update;
    return flowfabric.forget_flow(p_partition, p_flow);
end;
$$;

-- forget_flow: what delete_flow does, without waiting: busy when somebody has the flow, a group or a member in hand.
create or replace function flowfabric.forget_flow(p_partition integer, p_flow uuid) returns text
language plpgsql as $$
declare
    v_ids uuid[];
    v_live boolean;
    v_groups integer;
begin
    perform 1 from flowfabric.flow f where f.partition = p_partition and f.flow_id = p_flow for update skip locked;
    if not found then
        return 'busy';
    end if;
    with held as materialized (
        select from flowfabric.edge_group g where g.partition = p_partition and g.flow_id = p_flow for update skip locked)
    select count(*) into v_groups from held h;
    if v_groups < (select count(*) from flowfabric.edge_group g where g.partition = p_partition and g.flow_id = p_flow) then
        return 'busy';
    end if;
    with held as materialized (
        select e.id, e.completed_at is null as live from flowfabric.execution e where e.flow_id = p_flow
        order by e.id for update skip locked)
    select array_agg(h.id), coalesce(bool_or(h.live), false) into v_ids, v_live from held h;
    if v_live or exists (select from flowfabric.pending_cascade p where p.flow_id = p_flow) then
        return 'flow_not_terminal';
    elsif coalesce(cardinality(v_ids), 0) < (select count(*) from flowfabric.execution e where e.flow_id = p_flow) then
        return 'busy';
    end if;
    if v_ids is not null then
        perform flowfabric.purge_rows(array_fill(p_partition, array[cardinality(v_ids)]), v_ids);
    end if;
    perform flowfabric.purge_flows(array[p_partition], array[p_flow]);
    return 'ok';
end;
$$;

-- purge_flows: forget flows whose members are gone.
create or replace function flowfabric.purge_flows(p_partition integer[], p_flow uuid[]) returns void
language plpgsql as $$
begin
    delete from flowfabric.edge d using unnest(p_partition, p_flow) as u (partition, flow)
    where d.partition = u.partition and d.flow_id = u.flow;
    delete from flowfabric.edge_group g using unnest(p_partition, p_flow) as u (partition, flow)
    where g.partition = u.partition and g.flow_id = u.flow;
    delete from flowfabric.sibling_cancel s using unnest(p_partition, p_flow) as u (partition, flow)
    where s.partition = u.partition and s.flow_id = u.flow;
    -- The backlog first, as whoever acknowledges members does.
    delete from flowfabric.cancel_backlog c using unnest(p_partition, p_flow) as u (partition, flow)
    where c.partition = u.partition and c.flow_id = u.flow;
    delete from flowfabric.cancel_member c using unnest(p_partition, p_flow) as u (partition, flow)
    where c.partition = u.partition and c.flow_id = u.flow;
    delete from flowfabric.flow_summary s using unnest(p_partition, p_flow) as u (partition, flow)
    where s.partition = u.partition and s.flow_id = u.flow;
    delete from flowfabric.flow f using unnest(p_partition, p_flow) as u (partition, flow)
    where f.partition = u.partition and f.flow_id = u.flow;
end;
$$;
