-- Executions and what surrounds them: lanes, routes, the ready rows, timers, attempts, grants, the event log.
--
-- Rows are separated by how often they change and by who looks for them:
--   execution   one row from creation to purge; updated in place, no index on a column that changes (HOT)
--   ready       one narrow row while an execution may be claimed; deleted by the claim
--   timer       "look at these executions at this time"; one row per call, checked again when it is due
--   attempt     attempts that a later one replaced; the latest attempt lives in the execution
--   event       append-only; a ring of eight segments, emptied by age

create table flowfabric.deployment (
    one             boolean primary key default true constraint deployment_is_one_row check (one),
    flow_partitions integer not null constraint deployment_partitions_in_range check (flow_partitions between 1 and 65535),
    auto_reclaim    boolean not null default true,
    reclaim_grace   interval not null default '0',
    retention       interval not null default '24 hours',
    event_retention interval not null default '48 hours'
        constraint deployment_event_retention_long_enough check (event_retention >= interval '24 hours')
);
insert into flowfabric.deployment (flow_partitions) values (256);

-- The clock of tests: only the owner may move it.
create table flowfabric.clock (
    one   boolean primary key default true constraint clock_is_one_row check (one),
    shift interval not null default '0'
);
insert into flowfabric.clock default values;

-- Signing keys. Only the two padded halves that HMAC needs are stored; no function returns them.
create table flowfabric.keystore (
    kid          text primary key,
    inner_key    bytea,
    outer_key    bytea,
    state        text not null constraint keystore_state_known check (state in ('current', 'verifying', 'retired')),
    installed_at timestamptz not null,
    expires_at   timestamptz
);
create unique index keystore_one_current on flowfabric.keystore (state) where state = 'current';

create table flowfabric.lane (
    name          text collate "C" primary key,
    state         text not null default 'active'
        constraint lane_state_known check (state in ('active', 'paused', 'draining', 'disabled')),
    registered_at timestamptz not null,
    registered_by text not null
);

-- A lane, a kind and a required capability set, as one small number.
create table flowfabric.route (
    id           integer generated always as identity primary key,
    lane         text collate "C" not null references flowfabric.lane (name),
    kind         text collate "C" not null,
    capabilities text[] not null default '{}',
    digest       text not null
);
create unique index route_is_unique on flowfabric.route (lane, kind, digest);

create table flowfabric.execution (
    partition        integer not null,
    id               uuid not null,
    -- written once
    route            integer not null,
    created_at       timestamptz not null,
    namespace        text not null,
    creator          text not null,
    flow_id          uuid,
    idempotency_key  text,
    payload          bytea not null,
    payload_encoding text,
    policy           jsonb,
    budget_ids       uuid[],
    quota_policy_id  uuid,
    -- state: one word and the few facts it does not imply
    -- (no check constraint here and on timers: each is read in again by every statement; audit.sql checks instead)
    state            text not null,   -- waiting, delayed, rate_limited, waiting_children, active, suspended, resumable,
                                      -- completed, failed, cancelled, expired, skipped
    blocking_reason  text,
    blocking_detail  text,
    pending          text,        -- which attempt comes next: first, retry, replay, interrupted (the same again)
    resume_pending   boolean not null default false,
    lease_lost       text,        -- while active: expired, revoked
    priority         integer not null,
    tags             jsonb,
    -- counters, which only grow
    attempts         integer not null default 0,
    retries          integer not null default 0,
    replays          integer not null default 0,
    reclaims         integer not null default 0,
    epoch            bigint not null default 0,
    -- times at which something is due
    delay_until          timestamptz,
    deadline_at          timestamptz,
    attempt_timeout_at   timestamptz,
    attempt_timeout_left interval,
    -- the latest attempt
    attempt_index        integer,
    attempt_id           uuid,
    attempt_type         text,
    attempt_lifecycle    text,
    attempt_started_at   timestamptz,
    attempt_resumed_at   timestamptz,
    attempt_suspended_at timestamptz,
    attempt_ended_at     timestamptz,
    attempt_failure_reason   text,
    attempt_failure_category text,
    attempt_policy       jsonb,
    retry_reason         text,
    previous_attempt_index integer,
    replay_reason        text,
    replay_requested_by  text,
    replayed_from_attempt_index integer,
    reclaim_reason       text,
    disposition          text,
    retry_at             timestamptz,
    -- the latest lease of that attempt
    lease_id             uuid,
    worker_id            text,
    worker_instance_id   text,
    lease_ttl_ms         bigint,
    lease_acquired_at    timestamptz,
    lease_expires_at     timestamptz,
    lease_renewed_at     timestamptz,
    lease_lost_at        timestamptz,
    lease_revoke_reason  text,
    -- outcome
    result               bytea,
    result_encoding      text,
    failure_reason       text,
    failure_category     text,
    cancellation_reason  text,
    cancelled_by         text,
    pending_replay_reason       text,
    pending_replay_requested_by text,
    capability_mismatch_at timestamptz,
    progress_pct         smallint,
    progress_message     text,
    progress_updated_at  timestamptz,
    started_at           timestamptz,
    completed_at         timestamptz,
    transitioned_at      timestamptz not null,
    mutated_at           timestamptz not null,
    primary key (partition, id)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_analyze_scale_factor = 0.05);
-- Half-empty pages leave room for the claimed and the finished version of every row beside it (HOT).

-- Lists: newest first within a route, a namespace or a flow. None of these columns changes in the hot path.
create index execution_by_route on flowfabric.execution (route, created_at, id);
create index execution_by_namespace on flowfabric.execution (namespace, created_at, id) where namespace <> '';
create index execution_by_flow on flowfabric.execution (flow_id, created_at, id) where flow_id is not null;

create table flowfabric.ready (
    route         integer not null,
    rank          integer not null,   -- 9000 - priority, so that every column of the order ascends
    created_at    timestamptz not null,
    id            uuid not null,
    partition     integer not null,
    granted_until timestamptz,        -- hidden from claims while a grant lives
    deadline_at   timestamptz,
    available_at  timestamptz         -- a lost lease may be reclaimed from here on
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);
create unique index ready_order on flowfabric.ready (route, rank, created_at, id, partition);

-- Where the scan of a route may begin: below the lowest of these positions no ready row exists. An optimisation
-- that keeps claims away from dead index entries while an old snapshot keeps them alive. See ready_floor.sql.
create table flowfabric.ready_floor (
    route      integer not null,
    rank       integer not null,
    created_at timestamptz not null,
    id         uuid not null
);
create index ready_floor_by_route on flowfabric.ready_floor (route);

create table flowfabric.timer (
    kind       text not null,   -- lease, attempt, deadline, delay, parked, retention
    due_at     timestamptz not null,
    partitions integer[] not null,
    ids        uuid[] not null
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);
create index timer_due on flowfabric.timer (kind, due_at);

create table flowfabric.attempt (
    partition            integer not null,
    id                   uuid not null,
    attempt_index        integer not null,
    attempt_id           uuid not null,
    attempt_type         text not null,
    attempt_lifecycle    text not null,
    started_at           timestamptz not null,
    resumed_at           timestamptz,
    suspended_at         timestamptz,
    ended_at             timestamptz,
    lease_id             uuid not null,
    lease_epoch          bigint not null,
    worker_id            text not null,
    worker_instance_id   text not null,
    failure_reason       text,
    failure_category     text,
    policy_snapshot      jsonb,
    retry_reason         text,
    previous_attempt_index integer,
    replay_reason        text,
    replay_requested_by  text,
    replayed_from_attempt_index integer,
    reclaim_reason       text,
    disposition          text,
    retry_at             timestamptz,
    primary key (partition, id, attempt_index)
);

-- Narrow rows for lists that would otherwise have to search all executions.
create table flowfabric.tag (
    digest     bigint not null,        -- of key and value
    created_at timestamptz not null,
    id         uuid not null,
    partition  integer not null
);
create unique index tag_by_digest on flowfabric.tag (digest, created_at, id, partition);

create table flowfabric.unsuccessful (
    state      text not null,
    created_at timestamptz not null,
    id         uuid not null,
    partition  integer not null
);
create unique index unsuccessful_by_state on flowfabric.unsuccessful (state, created_at, id, partition);

create table flowfabric.blocked (
    blocking_reason text not null,
    created_at      timestamptz not null,
    id              uuid not null,
    partition       integer not null,
    blocked_at      timestamptz not null
);
create unique index blocked_by_reason on flowfabric.blocked (blocking_reason, created_at, id, partition);

create table flowfabric.idempotency (
    partition  integer not null,
    scope      uuid not null,          -- the flow, or nil for a stand-alone execution
    namespace  text not null,
    key        text not null,
    id         uuid not null,
    expires_at timestamptz not null,
    primary key (partition, scope, namespace, key)
);
create index idempotency_expiry on flowfabric.idempotency (expires_at);

create table flowfabric.claim_grant (
    partition           integer not null,
    id                  uuid not null,
    kind                text not null constraint claim_grant_kind_known check (kind in ('claim', 'reclaim')),
    grant_key           text not null,
    worker_id           text not null,
    worker_instance_id  text not null,
    lane                text not null,
    capability_hash     text,
    worker_capabilities text[] not null,
    route_snapshot      text,
    admission_summary   text,
    ttl_ms              bigint not null,
    issued_at           timestamptz not null,
    expires_at          timestamptz not null,
    primary key (partition, id)
);
create index claim_grant_expiry on flowfabric.claim_grant (expires_at);

-- One row per transition. The lease, the completion and the operator family each show the rows that concern them,
-- so that the end of a leased execution is one row in two families.
create sequence flowfabric.event_number;
-- So that last_value is always a number already given out. Not nextval, which would leave the next 32 unlogged: in a
-- database copied from this one a crash would give them out again.
select setval('flowfabric.event_number', 1);

create table flowfabric.event (
    slot               smallint not null,
    seq                bigint not null default nextval('flowfabric.event_number'),
    occurred_at        timestamptz not null,
    partition          integer not null,
    id                 uuid,
    flow_id            uuid,
    namespace          text,
    tags               jsonb,
    lease_type         text,
    outcome            text,
    operator_type      text,
    lease_id           uuid,
    lease_epoch        bigint,
    attempt_id         uuid,
    attempt_index      integer,
    worker_id          text,
    worker_instance_id text,
    reason             text,
    revoked_by         text,
    details            jsonb
) partition by list (slot);
create table flowfabric.event_0 partition of flowfabric.event for values in (0);
create table flowfabric.event_1 partition of flowfabric.event for values in (1);
create table flowfabric.event_2 partition of flowfabric.event for values in (2);
create table flowfabric.event_3 partition of flowfabric.event for values in (3);
create table flowfabric.event_4 partition of flowfabric.event for values in (4);
create table flowfabric.event_5 partition of flowfabric.event for values in (5);
create table flowfabric.event_6 partition of flowfabric.event for values in (6);
create table flowfabric.event_7 partition of flowfabric.event for values in (7);
create index event_order on flowfabric.event (seq);

-- Who sleeps, and until when at most: tells the writers whether a notification is worth its price.
create unlogged table flowfabric.sleeper (
    instance uuid not null,
    topic    text not null constraint sleeper_topic_known check (topic in ('work', 'timer')),
    until    timestamptz not null,     -- real time, not the movable clock
    wakes_at timestamptz,              -- for timers: when this process looks again by itself
    primary key (instance, topic)
);

-- What one item of a call came to. `code` is 'ok', 'replayed' or the kind of the refusal.
create type flowfabric.verdict as (
    ordinal            integer,
    code               text,
    detail             text,
    state              text,
    lease_epoch        bigint,
    attempt_id         uuid,
    at                 timestamptz
);

-- What a claim took out of a route.
create type flowfabric.taken as (partitions integer[], ids uuid[], tids tid[], again boolean);

-- What came out of the due timers of one kind.
create type flowfabric.due as (partitions integer[], ids uuid[], more boolean, last_due_at timestamptz);

create index ready_lost on flowfabric.ready (available_at) where available_at is not null;

-- An execution as readers see it: everything but payload and result, with its route spelt out.
create view flowfabric.execution_view as
select e.partition, e.id, e.created_at, e.namespace, e.creator, e.flow_id, e.idempotency_key, e.payload_encoding,
       e.policy, e.budget_ids, e.quota_policy_id, e.state, e.blocking_reason, e.blocking_detail, e.pending,
       e.resume_pending, e.lease_lost, e.priority, e.tags, e.attempts, e.retries, e.replays, e.reclaims, e.epoch,
       e.delay_until, e.deadline_at, e.attempt_timeout_at, e.attempt_timeout_left, e.attempt_index, e.attempt_id,
       e.attempt_type, e.lease_id, e.worker_id, e.worker_instance_id, e.lease_ttl_ms, e.lease_acquired_at,
       e.lease_expires_at, e.lease_renewed_at, e.lease_lost_at, e.lease_revoke_reason, e.result is not null as has_result,
       e.result_encoding, e.failure_reason, e.failure_category, e.cancellation_reason, e.cancelled_by,
       e.capability_mismatch_at, e.progress_pct, e.progress_message, e.progress_updated_at, e.started_at,
       e.completed_at, e.transitioned_at,
       greatest(e.mutated_at, e.lease_renewed_at, e.progress_updated_at) as mutated_at,
       r.lane, r.kind, r.capabilities
from flowfabric.execution e join flowfabric.route r on r.id = e.route;
