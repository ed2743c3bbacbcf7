-- Flows: graphs of executions, what joins them, and what is still to be done about them.
--
-- A group (all applied edges into one execution) guards the outcomes of its edges and decides about its execution.
-- What a call could not do at once stays as a narrow row: pending_cascade, sibling_cancel, cancel_member.

alter table flowfabric.execution
    add column node text,                                   -- its name in the flow, where it was submitted with one
    add column held_back text,                              -- of one that waits for dependencies: why it was held back before
    add column has_inputs boolean not null default false;   -- a claim has to look for what upstreams pass to it

create table flowfabric.flow (
    partition           integer not null,
    flow_id             uuid not null,
    flow_kind           text not null,
    namespace           text not null,
    state               text not null default 'open',   -- open, cancelled
    node_count          integer not null default 0,
    edge_count          integer not null default 0,     -- the graph's revision is both counts together
    created_at          timestamptz not null,
    last_mutation_at    timestamptz not null,
    cancelled_at        timestamptz,
    cancel_reason       text,
    cancellation_policy text,
    tags                jsonb not null default '{}',
    primary key (partition, flow_id)
) with (fillfactor = 70);
create index flow_by_time on flowfabric.flow (created_at, flow_id);
create index flow_empty on flowfabric.flow (last_mutation_at) where node_count = 0;

create table flowfabric.edge (
    partition        integer not null,
    flow_id          uuid not null,
    edge_id          uuid not null,
    upstream         uuid not null,
    downstream       uuid not null,
    data_passing_ref text,                  -- the upstream's result takes the place of the downstream's input
    passes           boolean not null default false,   -- the upstream's result is given to the downstream beside its input
    created_at       timestamptz not null,
    applied_at       timestamptz,           -- null: staged, and gates nothing
    from_run         integer not null default 0,   -- how the upstream's runs (its replays) before this one ended does not count
    outcome          text,                  -- how the upstream ended, once that was counted
    is_in_time       boolean not null default false,   -- counted before or with the decision of the group
    is_kept          boolean not null default false,   -- the upstream was replayed since; what it had passed is kept here
    kept_result      bytea,
    kept_encoding    text,
    resolved_at      timestamptz,
    resolved_event   bigint,
    primary key (partition, flow_id, edge_id)
) with (fillfactor = 60);
create index edge_from on flowfabric.edge (partition, upstream, downstream);
create index edge_into on flowfabric.edge (partition, downstream);

create table flowfabric.edge_group (
    partition    integer not null,
    flow_id      uuid not null,
    downstream   uuid not null,
    policy       text not null default 'all_of',    -- all_of, any_of, quorum
    k            integer,                           -- successes wanted; null: all
    cancel_rest  boolean not null default false,
    n            integer not null default 0,        -- applied edges
    succeeded    integer not null default 0,
    failed       integer not null default 0,
    skipped      integer not null default 0,
    state        text not null default 'pending',   -- pending, satisfied, impossible
    satisfied_at timestamptz,
    cancel_siblings_pending boolean not null default false,
    cancel_siblings_reason  text,
    primary key (partition, flow_id, downstream)
) with (fillfactor = 50);

-- A result that takes the place of an execution's input. The input itself is never rewritten.
create table flowfabric.injected_input (
    partition   integer not null,
    id          uuid not null,
    upstream    uuid not null,
    payload     bytea not null,
    encoding    text,
    injected_at timestamptz not null,
    primary key (partition, id)
);

-- Ends whose outgoing edges are not all resolved.
create table flowfabric.pending_cascade (
    seq         bigint primary key,    -- the completion event
    partition   integer not null,
    id          uuid not null,
    flow_id     uuid not null,
    run         integer not null,      -- which run of the execution ended so: its replays then
    outcome     text not null,
    after       uuid,                  -- downstreams before this one are done
    enqueued_at timestamptz not null
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

-- Upstreams that a decided group no longer needs, to be cancelled.
create table flowfabric.sibling_cancel (
    partition   integer not null,
    flow_id     uuid not null,
    downstream  uuid not null,
    siblings    uuid[] not null,
    enqueued_at timestamptz not null,
    due_at      timestamptz not null,      -- its place in the queue
    primary key (partition, flow_id, downstream)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
create index sibling_cancel_order on flowfabric.sibling_cancel (due_at);

-- Flows whose cancellation is under way, and the members still owed a cancel.
create table flowfabric.cancel_backlog (
    partition    integer not null,
    flow_id      uuid not null,
    requested_at timestamptz not null,
    requester    text not null,
    reason       text not null,
    cancellation_policy text not null,
    grace_until  timestamptz not null,
    primary key (partition, flow_id)
);
create index cancel_backlog_due on flowfabric.cancel_backlog (grace_until);
create table flowfabric.cancel_member (
    partition integer not null,
    id        uuid not null,
    flow_id   uuid not null,
    primary key (partition, id)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
create index cancel_member_by_flow on flowfabric.cancel_member (partition, flow_id, id);

-- Counted members, and the flows to be counted again: one row per change, as often as it comes.
create table flowfabric.flow_summary (
    partition        integer not null,
    flow_id          uuid not null,
    state            text not null,
    completed        integer not null,
    failed           integer not null,
    cancelled        integer not null,
    expired          integer not null,
    skipped          integer not null,
    active           integer not null,
    suspended        integer not null,
    waiting          integer not null,
    delayed          integer not null,
    rate_limited     integer not null,
    waiting_children integer not null,
    updated_at       timestamptz not null,
    primary key (partition, flow_id)
) with (fillfactor = 70);
create table flowfabric.flow_touched (
    partition integer not null,
    flow_id   uuid not null
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);

-- A claim also gives the results that upstreams pass on, side by side.
alter type flowfabric.claimed
    add attribute upstreams uuid[], add attribute upstream_states text[], add attribute upstream_results bytea[],
    add attribute upstream_encodings text[];

-- What upstreams pass to an execution: a result in place of its input, and results beside it.
create type flowfabric.inputs as (
    payload bytea, encoding text, upstreams uuid[], states text[], results bytea[], encodings text[]
);
