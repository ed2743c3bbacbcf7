-- The schema, in chapters: deployment, keys, lanes, executions, the queue, timers, attempts, lists, grants, limits, budgets,
-- steps, streams, waits, flows, schedules, events, processes, the registry, the server; then the types that functions pass around, and the
-- views that readers use.
--
-- Rows are separated by how often they change and by which calls read them:
--   execution   one row from creation to purge; updated in place, no index on a column that changes (HOT)
--   ready       one narrow row while an execution is claimable; the claim deletes it
--   timer       "check these executions at this time"; one row per call
--   attempt     attempts that a later one replaced; the latest attempt lives in the execution
--   event       append-only; a ring of eight segments, emptied by age
--   frame       append-only; the newest row of a stream has everything that the next append needs
--
-- `partition` is the partition of the execution or flow, which its id says (partition_of); `id` without a prefix is the
-- id of an execution.
-- Words (states, kinds, reasons) are text without check constraints where a hot statement writes them: each constraint
-- is read in again by every statement. The audit checks them instead (functions/audit).

-- Deployment ----------------------------------------------------------------------------------------------------------

create table flowfabric.deployment (
    one               boolean primary key default true constraint deployment_is_one_row check (one),
    flow_partitions   integer not null   -- how many partitions ids are spread over; fixed for the life of the database
        constraint deployment_partitions_in_range check (flow_partitions between 1 and 65535),
    auto_reclaim      boolean not null default true,        -- claims take over executions whose lease was lost
    reclaim_grace     interval not null default '0',        -- how long after the loss of a lease they may
    retention         interval not null default '7 days',   -- how long successful executions are kept
    event_retention   interval not null default '48 hours'  -- how long events are kept
        constraint deployment_event_retention_long_enough check (event_retention >= interval '24 hours'),
    failure_retention interval not null default '14 days',  -- how long failed and expired executions are kept
    event_heartbeats  boolean not null default false,       -- renewals of leases and heartbeats of workers are events too
    worker_event_retention interval not null default '24 hours', -- how long events of workers are kept
    event_floor       bigint not null default 0,            -- the last number of the events that were removed
    operator_audit_retention interval not null default '400 days'   -- how long rows of the audit log are kept
);
insert into flowfabric.deployment (flow_partitions) values (256);

-- The offset of the clock, for tests: only the owner may change it.
create table flowfabric.clock (
    one   boolean primary key default true constraint clock_is_one_row check (one),
    shift interval not null default '0'
);
insert into flowfabric.clock default values;

-- Keys ----------------------------------------------------------------------------------------------------------------

-- Signing keys. Only the two padded halves that HMAC needs are stored; no function returns them.
create table flowfabric.keystore (
    kid          text primary key,
    inner_key    bytea,
    outer_key    bytea,
    state        text not null constraint keystore_state_known check (state in ('current', 'verifying', 'retired')),
    installed_at timestamptz not null,
    expires_at   timestamptz           -- of a verifying key: until when its signatures are accepted
);
create unique index keystore_one_current on flowfabric.keystore (state) where state = 'current';

-- Lanes ---------------------------------------------------------------------------------------------------------------

create table flowfabric.lane (
    name          text collate "C" primary key,
    state         text not null default 'active'
        constraint lane_state_known check (state in ('active', 'paused', 'draining', 'disabled')),
    registered_at timestamptz not null,
    registered_by text not null
);

-- A lane, a kind, a required capability set, and whether there are limits, as one small number. Executions have such a
-- route for life, limited ones whatever their limits are. Their ready
-- rows have another one while not every worker of the kind may run them (see lanes/derive_route.sql): the same with the
-- version they began with, or with the code that stopped them.
create table flowfabric.route (
    id           integer generated always as identity primary key,
    lane         text collate "C" not null references flowfabric.lane (name),
    kind         text collate "C" not null,
    capabilities text[] not null default '{}',
    version      integer,                -- null: executions without a version
    limited      boolean not null default false,   -- its executions have a limit set: claims check their limits
    not_for      text[],                 -- digests of the code that stopped its executions, sorted; null: for all code
    is_free      boolean not null default false,   -- no binding is by its lane or kind alone (limits/free_routes.sql)
    digest       text not null           -- of capabilities, limited, version and not_for, for the unique index
);
create unique index route_is_unique on flowfabric.route (lane, kind, digest);
-- Those that not every worker of the lane covers; see workers/judge_routes.sql.
create index route_required on flowfabric.route (lane, id) where (capabilities <> '{}' or version is not null) and not_for is null;

-- Executions ----------------------------------------------------------------------------------------------------------

-- The order of the columns decides what an update writes to the WAL: the bytes between the first and the last that
-- changed. Columns that neither a claim nor an end changes come first, then those of a claim, then those of an end. Within
-- a group: 8 bytes, 4 bytes, 1 byte, text. A null takes no space anywhere.
create table flowfabric.execution (
    -- written once, or changed by rare calls
    partition        integer not null,
    route            integer not null,
    id               uuid not null,
    created_at       timestamptz not null,
    retries          integer not null default 0,       -- counters only grow
    replays          integer not null default 0,
    reclaims         integer not null default 0,
    generation       integer not null default 0,       -- counts replays of a success, which start without steps
    resume_pending   boolean not null default false,   -- resumed from a suspension, and not claimed since
    is_parked        boolean not null default false,   -- gave its lease back to wait: another's end, a signal or a time wakes it
    -- flags that save hot calls a lookup in other tables
    has_waitpoints   boolean not null default false,   -- it ever had one: the end of an attempt closes or moves them
    has_inputs       boolean not null default false,   -- upstreams pass results to it: a claim reads them
    has_reserved     boolean,                          -- it ever held amounts of a budget: the end of a lease ends that; null: no
    namespace        text not null,
    creator          text not null,
    payload          bytea not null,
    payload_encoding text,
    flow_id          uuid,
    node             text,            -- its name in the flow, if it was submitted with one
    parent_id        uuid,            -- the execution whose handler submitted it, in the same partition
    keeps_children   boolean,         -- it was cancelled without its children
    forked_from      uuid,            -- the execution whose steps it begins with
    forked_before    text,            -- the step of that one before which it begins, for people
    idempotency_key  text,
    policy           json,            -- shorter than jsonb
    limits           bigint,          -- its limit set; null: no limits
    tags             jsonb,
    deadline_at      timestamptz,
    capability_mismatch_at timestamptz,  -- a worker without the capabilities tried to claim it
    hmac_failed_at       timestamptz, -- a signal arrived with an invalid token
    pending_replay_reason       text, -- for the attempt that a replay starts
    pending_replay_requested_by text,
    -- the latest attempt, and its latest lease
    attempt_started_at   timestamptz,
    lease_expires_at     timestamptz,
    epoch                bigint not null default 0,    -- counts leases: part of the fence
    attempts             integer not null default 0,
    priority             integer not null,   -- here, where it fills a gap
    attempt_index        integer,
    worker               integer,     -- its number
    attempt_id           uuid,
    lease_id             uuid,
    attempt_type         text,        -- retry, reclaim, replay; null: initial
    attempt_policy       jsonb,
    pinned               integer,     -- the route of the version that the first attempt of its generation fixed; null: none
    lease_renewed_at     timestamptz, -- null: not since it was acquired
    attempt_resumed_at   timestamptz,
    attempt_suspended_at timestamptz,
    started_at           timestamptz, -- the first attempt; null: the latest attempt is the first
    previous_attempt_index integer,
    retry_reason         text,
    reclaim_reason       text,
    replay_reason        text,
    replay_requested_by  text,
    replayed_from_attempt_index integer,
    progress_pct         smallint,
    progress_message     text,
    progress_updated_at  timestamptz,
    -- state: one word and the few facts it does not imply
    transitioned_at  timestamptz not null,   -- the state changed
    mutated_at       timestamptz,     -- something else changed since; null: nothing
    completed_at     timestamptz,     -- set exactly in the five final states
    attempt_ended_at timestamptz,     -- null: not yet, or with the execution
    -- times at which something is due
    delay_until           timestamptz,
    attempt_timeout_at    timestamptz,
    attempt_timeout_left  interval,   -- while no lease runs: what is left for the attempt
    suspension_timeout_at timestamptz,   -- of the open suspension
    lease_lost_at    timestamptz,
    retry_at         timestamptz,     -- for a repeated report: when the retry was scheduled for
    state            text not null,   -- waiting, delayed, rate_limited, waiting_children, active, suspended, resumable,
                                      -- completed, failed, cancelled, expired, skipped
    blocking_reason  text,            -- why it waits, as a word
    blocking_detail  text,            -- the same for people
    pending          text,            -- which attempt comes next: first, retry, replay, interrupted (the same again)
    held_back        text,            -- while it waits for dependencies: the blocking reason it had before
    lease_lost       text,            -- while active: expired, revoked
    lease_revoke_reason  text,
    -- of executions that changed code stopped (leases/stop_changed.sql)
    stop_route           integer,     -- while only other code may claim it: the route of its ready row
    stops                integer,     -- how often in a row
    stop_epoch           bigint,      -- the lease that was stopped last
    stop_digests         text[],      -- of the code that stopped it, the latest last
    disposition          text,        -- how the attempt ended: completed, terminal_failed, retry_scheduled, expired,
                                      -- cancelled, skipped; null: it has not
    attempt_failure_reason   text,
    attempt_failure_category text,
    -- outcome
    result               bytea,
    result_encoding      text,
    failure_reason       text,
    failure_category     text,
    cancellation_reason  text,
    cancelled_by         text,
    primary key (partition, id)
) with (fillfactor = 42, autovacuum_vacuum_scale_factor = 0.05, autovacuum_analyze_scale_factor = 0.05);
-- Half-empty pages leave room for the claimed and the finished version of every row beside it (HOT): eight rows a page with
-- payloads of 200 bytes, two with 1,500. Decision 23 has the figures.

-- Lists: newest first within a route, a namespace or a flow. None of these columns changes in the hot path.
create index execution_by_route on flowfabric.execution (route, created_at, id);
create index execution_by_namespace on flowfabric.execution (namespace, created_at, id) where namespace <> '';
create index execution_by_flow on flowfabric.execution (flow_id, created_at, id) where flow_id is not null;
create index execution_by_parent on flowfabric.execution (parent_id, created_at, id) where parent_id is not null;
create index execution_by_limits on flowfabric.execution (limits, created_at, id) where limits is not null;

-- Cancelled and expired executions whose children still have to be cancelled.
create table flowfabric.child_cancel (
    partition   integer not null,
    id          uuid not null,         -- the parent
    enqueued_at timestamptz not null,
    due_at      timestamptz not null,  -- its position in the queue
    at_flows    boolean not null default false,   -- its executions are done, its flows are next
    after_at    timestamptz,           -- children up to this one were read: its time and id
    after_id    uuid,
    has_missed  boolean not null default false,   -- some were locked: read them all again
    primary key (partition, id)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
create index child_cancel_order on flowfabric.child_cancel (due_at);

-- The workers that claimed, as small numbers: executions and events have the number instead of two long names. A worker
-- gets a new one every day, so that old numbers fall out of use; see leases/number_worker.sql.
create table flowfabric.worker (
    id                 integer generated always as identity (cycle) primary key,
    worker_id          text not null,
    worker_instance_id text not null,
    numbered_at        timestamptz not null,
    unused_since       timestamptz        -- no execution has this number; events may
);
create index worker_by_name on flowfabric.worker (worker_instance_id, worker_id, numbered_at);
create index worker_by_time on flowfabric.worker (numbered_at);

-- Attempts that a later one replaced. The columns mean what they mean in the execution.
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
    lost_at              timestamptz,   -- its lease was lost then, which closed its stream
    lost                 text,          -- expired, revoked
    primary key (partition, id, attempt_index)
);

-- Which execution a key names. An id that the caller gave may be of another partition than its key would choose.
create table flowfabric.idempotency (
    scope      uuid not null,          -- the flow, or nil for a stand-alone execution
    namespace  text not null,
    key        text not null,
    id         uuid not null,
    expires_at timestamptz not null,
    primary key (scope, namespace, key)
);
create index idempotency_expiry on flowfabric.idempotency (expires_at);

-- Narrow rows for lists that would otherwise have to search all executions.
create table flowfabric.tag (
    digest     bigint not null,        -- of key and value
    created_at timestamptz not null,
    id         uuid not null,
    partition  integer not null
);
create unique index tag_by_digest on flowfabric.tag (digest, created_at, id, partition);

create table flowfabric.unsuccessful (
    state      text not null,          -- failed, cancelled, expired, skipped
    created_at timestamptz not null,
    ended_at   timestamptz not null,
    id         uuid not null,
    partition  integer not null
);
create unique index unsuccessful_by_state on flowfabric.unsuccessful (state, created_at, id, partition);
create index unsuccessful_by_end on flowfabric.unsuccessful (state, ended_at, id, partition);

create table flowfabric.blocked (
    blocking_reason text not null,
    created_at      timestamptz not null,
    id              uuid not null,
    partition       integer not null,
    rank            integer,            -- of those that a limit holds: their position in the queue,
    limit_id        uuid,               -- the budget or quota policy that denied them: its opening finds them here,
    limit_key       text collate "C",   -- the value of the policy's key; empty for budgets
    retry_at        timestamptz,        -- of a rate: when the window has room again
    blocked_at      timestamptz,
    needs           jsonb               -- the amounts that a paused execution waits for
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);
create unique index blocked_by_reason on flowfabric.blocked (blocking_reason, created_at, id, partition);
create index blocked_by_limit on flowfabric.blocked (limit_id, limit_key, rank, created_at, id) where limit_id is not null;

-- Tasks to submit because an execution failed, expired or was escalated: as its policy describes them, and the facts.
create table flowfabric.hook (
    seq    bigint generated always as identity primary key,
    spec   json not null,
    facts  jsonb not null,
    due_at timestamptz not null
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
create index hook_order on flowfabric.hook (due_at, seq);

-- The queue -----------------------------------------------------------------------------------------------------------

create table flowfabric.ready (
    route         integer not null,
    rank          integer not null,   -- of the priority (rank_of), so that every column of the order ascends
    created_at    timestamptz not null,
    id            uuid not null,
    partition     integer not null,
    granted_until timestamptz,        -- hidden from claims while a grant lives
    deadline_at   timestamptz,
    available_at  timestamptz,        -- of a lost lease: it may be reclaimed from then on
    limits        bigint,             -- its limit set; null: no limits
    namespace     text collate "C"    -- null: the default namespace
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);
create unique index ready_order on flowfabric.ready (route, rank, created_at, id);
create index ready_lost on flowfabric.ready (available_at) where available_at is not null;
create index ready_of_namespace on flowfabric.ready (namespace, route, rank, created_at, id) where namespace is not null;

-- The floors of routes: below the lowest of its positions, and without one, a route has no ready row. A hint that keeps
-- claims away from routes without work, and from dead index entries while an old snapshot keeps them alive. See
-- queue/cover_ready.sql.
create table flowfabric.ready_floor (
    lane       text collate "C" not null,
    route      integer not null,
    rank       integer not null,
    created_at timestamptz not null,
    id         uuid not null
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
create index ready_floor_order on flowfabric.ready_floor (lane, route, rank, created_at, id);

create table flowfabric.timer (
    kind       text not null,   -- lease, attempt, deadline, delay, parked, suspension, waitpoint, retention
    due_at     timestamptz not null,
    partitions integer[] not null,
    ids        uuid[] not null
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);
create index timer_due on flowfabric.timer (kind, due_at);

-- Grants --------------------------------------------------------------------------------------------------------------

-- The right of one worker to claim one execution, for a short time.
create table flowfabric.claim_grant (
    partition           integer not null,
    id                  uuid not null,
    kind                text not null constraint claim_grant_kind_known check (kind in ('claim', 'reclaim')),
    grant_key           text not null,       -- signed; see grants/write_grant.sql
    worker_id           text not null,
    worker_instance_id  text not null,
    lane                text not null,
    capability_hash     text,                -- given by the scheduler, returned unchanged
    worker_capabilities text[] not null,
    route_snapshot      text,
    admission_summary   text,
    ttl_ms              bigint not null,
    issued_at           timestamptz not null,
    expires_at          timestamptz not null,
    quota_policy_ids    uuid[],              -- the policies whose slots were taken for it; null: none
    primary key (partition, id)
);
create index claim_grant_expiry on flowfabric.claim_grant (expires_at);

-- Limits --------------------------------------------------------------------------------------------------------------

-- The budgets and quota policies of executions, as one number: the beginning of a hash of its content. Submitters find it
-- by that number, and never wait for each other: the same set may be stored twice.
create table flowfabric.limit_set (
    digest       bigint not null,
    budget_ids   uuid[] not null,       -- sorted
    quota_ids    uuid[] not null,       -- sorted
    quota_keys   text[] not null,       -- per policy: the value of the tag it is kept by, `default` without one
    checked_at   timestamptz not null,  -- when the sweep looked at it last
    unused_since timestamptz,           -- no execution had it then: submissions store it again
    unused_xid   xid8                   -- the transaction that found this
);
create index limit_set_by_digest on flowfabric.limit_set (digest);
create index limit_set_by_check on flowfabric.limit_set (checked_at);
create index limit_set_by_budget on flowfabric.limit_set using gin (budget_ids) with (fastupdate = off) where budget_ids <> '{}';

-- Rates and caps.
create table flowfabric.quota_policy (
    id             uuid primary key,
    name           text collate "C",
    key            text,                      -- a tag: the numbers hold for each of its values
    window_seconds bigint not null,           -- 0: 60 if there is a rate
    max_requests   bigint not null,           -- per window; 0: no rate
    max_concurrent bigint not null,           -- 0: no cap
    jitter_ms      bigint not null,           -- retries of the refused are spread over this time
    created_at     timestamptz not null,
    updated_at     timestamptz not null
);
create unique index quota_policy_by_name on flowfabric.quota_policy (name) where name is not null;

-- The limits that apps declare: a digest of what was stored last. A worker that declares the same again leaves a limit as
-- an operator has set it since.
create table flowfabric.declared_limit (
    name        text collate "C" primary key,   -- "budget <name>", "quota <name>"
    digest      text not null,
    declared_at timestamptz not null
);

-- Which limits submissions of a scope get: all columns of the scope that are not null must match. Create calls look them up
-- by their anchor, and what they find becomes part of the limit set; nothing reads them later.
create table flowfabric.limit_binding (
    id          uuid primary key,                -- follows from the limit and the scope
    anchor      text collate "C" not null,       -- the most particular column of the scope: tag, namespace, flow, kind, lane
    what        text not null constraint limit_binding_what_known check (what in ('budget', 'quota')),
    limit_id    uuid not null,
    lane        text collate "C",
    kind        text collate "C",
    namespace   text collate "C",
    tag         text collate "C",
    value       text collate "C",                -- of the tag
    flow_kind   text collate "C",
    is_declared boolean not null,                -- by the code of an app
    created_at  timestamptz not null
);
create index limit_binding_by_anchor on flowfabric.limit_binding (anchor);
create index limit_binding_by_limit on flowfabric.limit_binding (limit_id, id);

-- One row per policy and value of its key, which admissions lock: they are serial while a limit is near.
create table flowfabric.quota_head (
    policy_id   uuid not null,
    key         text collate "C" not null,
    floor       bigint not null default 0,   -- no slot has a lower number
    asked       interval[] not null default '{}',      -- windows that callers of check_admission ask for: entries stay as long
    asked_until timestamptz[] not null default '{}',   -- when each is forgotten; one within a longer, later one is left out
    primary key (policy_id, key)
) with (fillfactor = 50);

-- Who holds a slot of a policy: a running execution, a grant, or a caller of check_admission. Removed with the end of
-- that; counted, not summed up, so that a slot is free when the transaction that removes it commits.
create table flowfabric.quota_slot (
    id          uuid not null,               -- the execution
    partition   integer not null,
    policy_id   uuid not null,
    key         text collate "C" not null,
    number      bigint generated always as identity,
    admitted_at timestamptz not null,
    until       timestamptz,                 -- of a grant, or a direct caller: when it ends; null: with the run
    origin      text not null,               -- scheduler, direct
    primary key (id, partition, policy_id)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);
create index quota_slot_by_number on flowfabric.quota_slot (policy_id, key, number);

-- The admissions within the windows of rates; another admission of the same execution moves its entry.
create table flowfabric.quota_entry (
    policy_id   uuid not null,
    key         text collate "C" not null,
    id          uuid not null,
    partition   integer not null,
    admitted_at timestamptz not null,
    primary key (id, partition, policy_id, key)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);
create index quota_entry_by_time on flowfabric.quota_entry (policy_id, key, admitted_at);

-- Limits that have, or will have, room for executions that they hold: left by ends that found the limit locked, and by
-- refusals of a rate. The duty `unblock` works them off.
create table flowfabric.limit_due (
    due_at   timestamptz not null,
    limit_id uuid not null,
    key      text collate "C" not null
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
create index limit_due_order on flowfabric.limit_due (due_at);
create index limit_due_by_limit on flowfabric.limit_due (limit_id, key, due_at);

-- Executions that claims moved aside, by claim and reason: counted by the duty `unblock`, which adds them to the totals.
create table flowfabric.denial (
    denied_at timestamptz not null,
    lane      text collate "C" not null,
    reason    text not null constraint denial_reason_known check (reason in ('budget', 'rate', 'concurrency')),
    dimension text collate "C" not null,   -- of the budget; empty for quotas
    count     integer not null
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
create index denial_order on flowfabric.denial (denied_at);
create table flowfabric.denial_total (
    reason    text not null,
    dimension text collate "C" not null,
    count     bigint not null,
    primary key (reason, dimension)
);

-- Budgets -------------------------------------------------------------------------------------------------------------

-- What may be used. The row is the lock of everything that changes the budget; the running numbers are in budget_head.
create table flowfabric.budget (
    id              uuid primary key,
    name            text collate "C" not null,     -- without one the id
    scope_type      text collate "C" not null default '',
    scope_id        text collate "C" not null default '',
    mode            text not null default 'strict' constraint budget_mode_known check (mode in ('strict', 'warn')),
    on_hard_limit   text not null default '',
    on_soft_limit   text not null default '',
    reset_interval  interval,                      -- null: never
    dimensions      text[] collate "C" not null default '{}',   -- sorted
    hard            bigint[] not null default '{}',             -- of each of them; 0: no limit
    soft            bigint[] not null default '{}',
    generation      integer not null default 0,    -- counts resets
    reset_count     integer not null default 0,
    last_reset_at   timestamptz,
    next_reset_at   timestamptz,
    created_at      timestamptz,                   -- null: it was reported to and not created
    updated_at      timestamptz not null,
    is_lowered      boolean not null default false,   -- a limit was set below what was used and held
    owner_partition integer,                       -- the execution or flow with which it is purged
    owner_id        uuid,
    constraint budget_has_limits check (
        cardinality(hard) = cardinality(dimensions) and cardinality(soft) = cardinality(dimensions)),
    constraint budget_limits_positive check ((0 <= all (hard) and 0 <= all (soft)) is true)
);
create unique index budget_by_name on flowfabric.budget (name);
create index budget_by_scope on flowfabric.budget (scope_type, scope_id, name);
create index budget_by_owner on flowfabric.budget (owner_id) where owner_id is not null;
create index budget_due on flowfabric.budget (next_reset_at) where next_reset_at is not null;

-- The running numbers of budgets. A change is a new row, and the newest is found first: dead rows behind it are never
-- read, however long an old snapshot keeps it. Decision 34 has the figures. The arrays have an element per dimension.
create table flowfabric.budget_head (
    budget_id       uuid not null,
    seq             bigint not null,
    at              timestamptz not null,
    breaches        bigint not null,       -- how often a call did not fit under a hard limit
    soft_breaches   bigint not null,
    generation      integer not null,
    is_strict       boolean not null,
    exhausted       text,                  -- the first dimension whose hard limit is reached; null: none
    dimensions      text[] collate "C" not null,   -- sorted: those of the definition, and all that were ever used or held
    used            bigint[] not null,     -- null: never counted
    held            bigint[] not null,
    overrun         bigint[] not null,     -- what settlements could not count
    hard            bigint[] not null,
    soft            bigint[] not null,
    last_breach_at  timestamptz,
    last_breach_dim text,
    primary key (budget_id, seq),
    constraint budget_head_has_numbers check (
        cardinality(used) = cardinality(dimensions) and cardinality(held) = cardinality(dimensions)
        and cardinality(overrun) = cardinality(dimensions) and cardinality(hard) = cardinality(dimensions)
        and cardinality(soft) = cardinality(dimensions)),
    constraint budget_head_positive check (
        (0 > any (used)) is not true and (0 <= all (held) and 0 <= all (overrun) and 0 <= all (hard) and 0 <= all (soft)) is true)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);

-- The keys of calls that were counted.
create table flowfabric.budget_key (
    budget_id  uuid not null,
    key        text collate "C" not null,
    expires_at timestamptz not null,
    primary key (budget_id, key)
);
create index budget_key_expiry on flowfabric.budget_key (expires_at);

-- The ledger: what record_spend counted for an execution.
create table flowfabric.budget_spend (
    budget_id    uuid not null,
    execution_id uuid not null,
    generation   integer not null,
    dimension    text collate "C" not null,
    amount       bigint not null,
    recorded_at  timestamptz not null,
    is_known     boolean not null,     -- the execution existed then
    primary key (budget_id, execution_id, generation, dimension)
);
create index budget_spend_by_execution on flowfabric.budget_spend (execution_id);

-- What executions used, by their own reports and settlements.
create table flowfabric.budget_usage (
    partition integer not null,
    id        uuid not null,
    budget_id uuid not null,
    dimension text collate "C" not null,
    amount    bigint not null,
    primary key (partition, id, budget_id, dimension)
) with (fillfactor = 70);

-- What executions hold before they use it: a row per reservation and budget, changed under the lock of the budget. A
-- reservation ends with its lease; one that is given back is deleted.
create table flowfabric.reservation (
    partition         integer not null,
    id                uuid not null,
    reservation_id    uuid not null,
    budget_id         uuid not null,
    epoch             bigint not null,     -- of the lease
    generation        integer not null,    -- of the execution
    budget_generation integer not null,    -- in which it was made, or charged
    name              text collate "C",    -- outside a step: its name and number, as of a step
    n                 integer,
    on_lost           text not null,       -- charge, release
    state             text not null,       -- held, charged (the lease was lost), settled
    dimensions        text[] collate "C" not null,
    amounts           bigint[] not null,
    reserved_at       timestamptz not null,
    settled_at        timestamptz,
    lost              boolean,             -- while held: its lease has ended, and whether it was lost; null: not known
    lost_at           timestamptz,         -- while held: when that was noted
    primary key (partition, id, reservation_id, budget_id)
);
create index reservation_ended on flowfabric.reservation (lost_at) where lost is not null and state = 'held';
create index reservation_held on flowfabric.reservation (budget_id, partition, id) where state = 'held';
create index reservation_settled on flowfabric.reservation (settled_at) where settled_at is not null;

-- Steps ---------------------------------------------------------------------------------------------------------------

-- Steps that a handler finished and does not repeat, by name; each kind has its own names. `run` counts retries and
-- replays: a failure is kept for its run only, a success for the generation.
create table flowfabric.step (
    partition       integer not null,
    id              uuid not null,
    generation      integer not null,
    name            text collate "C" not null,
    n               integer not null,   -- how often the name was used before in this run
    kind            text not null
        constraint step_kind_known check (kind in ('step', 'now', 'sleep', 'submit', 'result', 'wait', 'patch', 'usage')),
    run             integer not null,
    attempt_index   integer not null,
    result          bytea,
    encoding        text,               -- the codec of the result
    outcome         text,               -- of wait: resumed, timed_out, operator_resumed, given_up (null: open), redacted;
                                        -- of submit: known, if the execution existed before; of step and result:
                                        -- retried, if it failed before and the handler continued after that
    error           jsonb,              -- set when the step or the awaited execution failed
    at              timestamptz,        -- of now: the time; of sleep and wait: when it ends
    child_partition integer,            -- of submit: the created execution
    child_id        uuid,
    flow_id         uuid,               -- of submit: the created flow
    waitpoint_ids   uuid[],             -- of wait: the waitpoints of the wait
    is_stray        boolean not null default false,   -- recorded by a run that ended because its code had changed, or after
                                        -- something that a replay made start again: code that does not ask for it is
                                        -- not changed code
    is_unread       boolean not null default false,   -- of wait: ended by signals that the handler has not read, or
                                        -- after which it has recorded nothing
    seconds         double precision,   -- how long the step took
    place           integer,            -- of step, result, sleep and wait: its number in the order in which the handler got
                                        -- their ends (null: not yet)
    recorded_at     timestamptz not null,
    primary key (partition, id, generation, kind, name, n)
);

-- Streams -------------------------------------------------------------------------------------------------------------

-- The frames of attempts, durable ones and summary deltas. A row is a run of frames that one call stored: of one attempt,
-- mode, kind, type and encoding, with consecutive ids. No row is ever updated: each has the state of its stream after its
-- last frame, so that an append reads the newest row only. Closing writes nothing: the attempt says when and how it ended.
create table flowfabric.frame (
    ms              bigint not null,    -- the id of its last frame: milliseconds, and a number within them
    partition       integer not null,
    attempt_index   integer not null,
    n               integer not null,
    size            integer not null,   -- how many frames; 0: says that the stream has frames in the ring
    frames          integer not null,   -- of the stream so far: appends,
    durable         integer not null,   -- durable frames,
    version         integer not null,   -- summary deltas
    marks           integer not null,   -- the last mark of its worker: a frame with this or a lower one is not stored again
    type_marks      integer,            -- how many frames of this mode and type a re-run of the handler leaves out
    id              uuid not null,
    has_live        boolean not null,   -- the stream has, or had, frames in the ring
    mode            text not null,      -- durable, summary
    kind            text not null,      -- stdout, stderr, event, blob
    frame_type      text not null,      -- empty: the kind
    encoding        text,               -- the codecs of the payloads
    payloads        bytea[] not null,
    correlation_ids text[],
    seqs            bigint[],
    trimmed         integer,            -- durable frames up to this number were removed
    cap             integer,            -- how many durable frames it keeps; null: 10,000
    folded          integer,            -- the version of the stored document,
    bound           integer,            -- and what the document with all deltas has at most, in bytes
    ema             double precision,   -- best effort: frames per second,
    live_ms         bigint,             -- the last one,
    live_cap        integer,            -- and how many were kept then
    primary key (partition, id, attempt_index, ms, n)
);
create index frame_deltas on flowfabric.frame (partition, id, attempt_index, version) where mode = 'summary';

-- Best-effort frames, in the form of the others: a ring of four segments, emptied by age. A crash of the server empties it.
create table flowfabric.live_frame (
    ms              bigint not null,
    partition       integer not null,
    attempt_index   integer not null,
    n               integer not null,
    size            integer not null,
    frames          integer not null,
    live            integer not null,   -- best-effort frames of the stream so far
    live_floor      integer not null,   -- those up to this number are beyond the cap
    live_cap        integer not null,
    live_ms         bigint not null,
    ema             double precision not null,
    ttl_ms          bigint not null,    -- invisible after twice this time; 0: never
    slot            smallint not null,  -- the segment
    id              uuid not null,
    kind            text not null,
    frame_type      text not null,
    encoding        text,
    payloads        bytea[] not null,
    correlation_ids text[],
    seqs            bigint[]
) partition by list (slot);
create unlogged table flowfabric.live_frame_0 partition of flowfabric.live_frame for values in (0);
create unlogged table flowfabric.live_frame_1 partition of flowfabric.live_frame for values in (1);
create unlogged table flowfabric.live_frame_2 partition of flowfabric.live_frame for values in (2);
create unlogged table flowfabric.live_frame_3 partition of flowfabric.live_frame for values in (3);
create index live_frame_order on flowfabric.live_frame (partition, id, attempt_index, ms, n);

-- The summary documents of attempts, without the newest deltas: see streams/merge_deltas.sql.
create table flowfabric.summary (
    partition     integer not null,
    id            uuid not null,
    attempt_index integer not null,
    version       integer not null,   -- how many deltas are merged into it
    first_ms      bigint not null,    -- the first of them
    document      jsonb not null,
    primary key (partition, id, attempt_index)
);

-- Waits ---------------------------------------------------------------------------------------------------------------

-- What parked executions wait for: the end of executions, and signals at pending waitpoints. Removed by whatever wakes them.
create table flowfabric.waiter (
    partition         integer not null,
    id                uuid not null,
    awaited_partition integer not null,
    awaited_id        uuid not null,     -- an execution or a waitpoint
    primary key (partition, id, awaited_partition, awaited_id)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
create index waiter_by_awaited on flowfabric.waiter (awaited_partition, awaited_id);

-- Where signals arrive. The token is not stored: it is signed again from the keystore when it is asked for.
create table flowfabric.waitpoint (
    partition             integer not null,
    waitpoint_id          uuid not null,
    id                    uuid not null,        -- the execution
    attempt_index         integer not null,
    suspension_id         uuid,                 -- set when it becomes active
    waitpoint_key         text not null,        -- its name within the wait
    token_kid             text not null,        -- the key that signs its token
    state                 text not null,        -- pending, active, closed, expired
    outlives_attempt      boolean not null,     -- moves to the next attempt instead of closing with its own
    required_signal_names text[] not null default '{}',
    payload_schema        text,                 -- the JSON schema of payloads; null: every payload is accepted
    created_at            timestamptz not null,
    activated_at          timestamptz,
    expires_at            timestamptz,          -- while pending: its own; while active: when its suspension ends
    signal_count          integer not null default 0,
    matched_signal_count  integer not null default 0,
    dropped_signal_count  integer not null default 0,
    refused_signal_count  integer not null default 0,       -- signals that a worker set aside
    dropped_upto          integer not null default 0,       -- no signal up to this ordinal is left to drop
    counted_by            integer[] not null default '{}',  -- while active: which leaves of the condition have counted it
    is_escalated          boolean not null default false,   -- a hook was submitted because its wait takes too long
    last_signal_at        timestamptz,
    satisfied_at          timestamptz,
    closed_at             timestamptz,
    close_reason          text,
    primary key (waitpoint_id)                  -- once and for all, not per partition
) with (fillfactor = 70);
create index waitpoint_by_execution on flowfabric.waitpoint (partition, id, waitpoint_id);
create index waitpoint_open on flowfabric.waitpoint (created_at, waitpoint_id) where state in ('pending', 'active');

-- One row per suspension; open while closed_at is null.
create table flowfabric.suspension (
    partition         integer not null,
    id                uuid not null,
    number            integer not null,         -- counts the suspensions of the execution
    suspension_id     uuid not null,
    attempt_index     integer not null,
    attempt_id        uuid not null,
    lease_id          uuid not null,            -- the fence that suspended, for a repeated call
    lease_epoch       bigint not null,
    waitpoint_ids     uuid[] not null,          -- the first is the primary
    waitpoint_keys    text[] not null,
    reason_code       text not null,
    requested_by      text not null,
    continuation_metadata_pointer text,
    resume_condition  jsonb not null,
    counts            integer[],                -- while open: how many things each leaf of the condition has counted; null: none
    resume_policy     jsonb not null,
    suspended_at      timestamptz not null,
    timeout_at        timestamptz,
    timeout_behavior  text,
    idempotency_key   text,
    replay_until      timestamptz,              -- a repeated call returns this row until then
    is_early          boolean not null,         -- was satisfied by signals that had arrived before; never open
    keeps_waitpoints  boolean not null default false,   -- of several waits: the next signal resumes it, and its waitpoints stay open
    last_signal_at    timestamptz,
    satisfied_at      timestamptz,
    closed_at         timestamptz,
    close_reason      text,
    trigger_type      text,                     -- what ended it: signal, operator, timeout
    closer_signal_id  uuid,                     -- the signal that satisfied the condition
    satisfier_signal_ids uuid[],                -- all signals that count for it
    primary key (partition, id, number)
) with (fillfactor = 70);
create unique index suspension_one_open on flowfabric.suspension (partition, id) where closed_at is null;
create index suspension_open_by_time on flowfabric.suspension (partition, suspended_at, id) where closed_at is null;

create table flowfabric.signal (
    partition        integer not null,
    id               uuid not null,
    ordinal          integer not null,          -- counts the signals of the execution: the order everywhere
    signal_id        uuid not null,
    waitpoint_id     uuid not null,
    waitpoint_key    text not null,
    suspension_id    uuid,
    signal_name      text not null,
    signal_category  text not null,
    source_type      text not null,
    source_identity  text not null,
    correlation_id   text not null,
    payload          bytea,
    payload_encoding text not null,
    idempotency_key  text,
    target_scope     text not null,
    created_at       timestamptz not null,      -- as the sender says
    accepted_at      timestamptz not null,
    observed_effect  text not null,             -- what it did to the suspension
    match_detail     text not null,             -- what it did for the condition
    source_hash      bigint,                    -- set if a leaf of the condition counted its source; see source_hash()
    refused          text,                      -- why a worker set it aside; it counts for nothing then
    is_dropped       boolean not null default false,   -- only its identity is kept, so that a repetition is recognised
    primary key (partition, id, ordinal)
);
-- The id first: beside the primary key no other order decides, when statistics are wrong, which index finds one signal. Calls
-- compare partition and id as a row, which no index serves.
create unique index signal_by_id on flowfabric.signal (signal_id, partition, id);
create index signal_by_waitpoint on flowfabric.signal (partition, waitpoint_id, ordinal);
create index signal_by_key on flowfabric.signal (partition, waitpoint_id, idempotency_key)
    where idempotency_key is not null;
create index signal_by_source on flowfabric.signal (source_hash) where source_hash is not null;

-- Flows ---------------------------------------------------------------------------------------------------------------

-- Graphs of executions. A group (all applied edges into one execution) guards the outcomes of its edges and decides
-- about its execution. Work that a call leaves for later is a narrow row: pending_cascade, sibling_cancel,
-- cancel_member.
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
    parent_id           uuid,                           -- the execution whose handler submitted it; a flow with an
                                                        -- idempotency key may be in another partition
    primary key (partition, flow_id)
) with (fillfactor = 70);
create index flow_by_time on flowfabric.flow (created_at, flow_id);
create index flow_by_parent on flowfabric.flow (parent_id, created_at, flow_id) where parent_id is not null;
create index flow_empty on flowfabric.flow (last_mutation_at) where node_count = 0;

create table flowfabric.edge (
    partition        integer not null,
    flow_id          uuid not null,
    edge_id          uuid not null,
    upstream         uuid not null,
    downstream       uuid not null,
    data_passing_ref text,                  -- the upstream's result replaces the downstream's input
    passes           boolean not null default false,   -- the upstream's result is passed beside the downstream's input
    created_at       timestamptz not null,
    applied_at       timestamptz,           -- null: staged, and blocks nothing
    from_run         integer not null default 0,   -- ends of the upstream's runs (its replays) before this one do not count
    outcome          text,                  -- how the upstream ended, once counted
    is_in_time       boolean not null default false,   -- counted before or with the decision of the group
    is_kept          boolean not null default false,   -- the upstream was replayed since; its old result, or
                                                       -- for all_settled its old reason and category, is kept here
    kept_result      bytea,
    kept_encoding    text,
    resolved_at      timestamptz,
    resolved_event   bigint,
    primary key (partition, flow_id, edge_id)
) with (fillfactor = 60);
-- Calls that look for the edges of one execution compare the flow with `is not distinct from`: by the primary key they would
-- read the whole flow.
create index edge_from on flowfabric.edge (partition, upstream, downstream);
create index edge_into on flowfabric.edge (partition, downstream);

create table flowfabric.edge_group (
    partition    integer not null,
    flow_id      uuid not null,
    downstream   uuid not null,
    policy       text not null default 'all_of',    -- all_of, any_of, quorum, all_settled
    k            integer,                           -- required successes; null: all
    cancel_rest  boolean not null default false,    -- once decided, cancel the upstreams that are still running
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

-- A result that replaces an execution's input. The stored input itself never changes.
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
    run         integer not null,      -- which run of the execution ended: its replays at that time
    outcome     text not null,
    after       uuid,                  -- downstreams before this one are done
    enqueued_at timestamptz not null
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
create index pending_cascade_order on flowfabric.pending_cascade (enqueued_at, seq);
create index pending_cascade_by_flow on flowfabric.pending_cascade (partition, flow_id, id);

-- Upstreams to cancel because a decided group no longer needs them.
create table flowfabric.sibling_cancel (
    partition   integer not null,
    flow_id     uuid not null,
    downstream  uuid not null,
    siblings    uuid[] not null,
    enqueued_at timestamptz not null,
    due_at      timestamptz not null,      -- its position in the queue
    primary key (partition, flow_id, downstream)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
create index sibling_cancel_order on flowfabric.sibling_cancel (due_at);

-- Flows that are being cancelled, and the members that still have to be.
create table flowfabric.cancel_backlog (
    partition    integer not null,
    flow_id      uuid not null,
    requested_at timestamptz not null,
    requester    text not null,
    reason       text not null,
    cancellation_policy text not null,
    grace_until  timestamptz not null,     -- until then the members are left to the caller
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

-- Counted members, and the flows to count again: one row per change.
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

-- Schedules -----------------------------------------------------------------------------------------------------------

-- The process that advances next_at from the value it read creates the due executions: nothing fires twice.
create table flowfabric.schedule (
    name             text collate "C" primary key,
    kind             text not null,
    timing           jsonb not null,    -- when it fires, as the engine reads it
    catch_up         text not null constraint schedule_catch_up_known check (catch_up in ('skip', 'one', 'all')),
    payload          bytea not null,
    payload_encoding text,
    options          jsonb not null,    -- of its submissions
    paused           boolean not null default false,
    next_at          timestamptz,       -- null: never again
    last_at          timestamptz,       -- the latest time it fired for
    last_partition   integer,           -- the execution created then
    last_id          uuid,
    created_at       timestamptz not null,
    updated_at       timestamptz not null
);
create index schedule_due on flowfabric.schedule (next_at) where not paused;

-- Events --------------------------------------------------------------------------------------------------------------

create sequence flowfabric.event_number;
-- So that last_value is always a number already drawn. Not nextval, which would leave the next 32 unlogged: in a
-- database copied from this one a crash would draw them again.
select setval('flowfabric.event_number', 1);

-- One row per transition. The lease, the completion and the operator family each show the rows that concern them,
-- so that the end of a leased execution is one row in two families. Events of workers have no execution; their partition
-- is 0, and `details` names the worker.
create table flowfabric.event (
    seq                bigint not null default nextval('flowfabric.event_number'),
    occurred_at        timestamptz not null,
    lease_epoch        integer,                -- readers get a bigint, as everywhere else
    partition          integer not null,
    attempt_index      integer,
    worker             integer,                -- its number
    route              integer,                -- of the execution: its lane and kind
    slot               smallint not null,      -- the segment of the ring
    id                 uuid,
    attempt_id         uuid,
    lease_id           uuid,
    flow_id            uuid,
    parent_id          uuid,                   -- completion family: the execution that submitted it
    namespace          text,
    tags               jsonb,
    lease_type         text,                   -- lease family: acquired, renewed, expired, reclaimed, revoked
    outcome            text,                   -- completion family: the final state
    operator_type      text,                   -- operator family: what was done
    reason             text,
    revoked_by         text,
    details            jsonb,
    signal_effect      text,                   -- signal family: what a delivery did
    worker_type        text,                   -- worker family: registered, heartbeat, marked_dead, ttl_swept
    actor              text                    -- the operator, if the transaction names one (server/write_operator_audit.sql)
        default nullif(current_setting('flowfabric.actor', true), '')
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
create index event_of_signal on flowfabric.event (id, seq) where signal_effect is not null;

-- The epochs of the log, each with the server that wrote it and the last number that the next server found. A restore
-- or a failover may lose the end of the log, and the next server then gives the lost numbers out again.
create table flowfabric.log_epoch (
    epoch         bigint primary key    -- 0, or the second at which it began; cursors have four bytes for it
        constraint log_epoch_fits_a_cursor check (epoch between 0 and 4294967295),
    last_position bigint,               -- null: the current epoch
    system        bigint,               -- the system identifier of the server; null: it may not be read
    timeline      integer,              -- its timeline; null: likewise
    log           oid,                  -- of the table with the events: restored from a dump, it is another
    database      oid                   -- put back from a copy on the same server, it is another
);
create unique index log_epoch_one_current on flowfabric.log_epoch ((true)) where last_position is null;
insert into flowfabric.log_epoch (epoch) values (0);

-- Which processes want a notification when an execution ends (topic ended) or has new frames (frames). A hint: they also
-- poll. A notification removes the row.
create unlogged table flowfabric.watch (
    partition integer not null,
    id        uuid not null,
    topic     text collate "C" not null,
    instance  uuid not null,
    until     timestamptz not null,     -- real time, not the movable clock
    primary key (partition, id, topic, instance)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

-- Which processes follow the log and sleep, and until when at most: writers notify only these. Like `sleeper`, in real time,
-- and a new row for each sleep.
create unlogged table flowfabric.follower (
    until    timestamptz not null,
    instance uuid not null
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
create index follower_by_end on flowfabric.follower (until);

-- Durable consumers of the log: up to which event each has acted. The transaction that acts moves the position, under the
-- lock of the row; `instance` only says which process should try.
create table flowfabric.consumer (
    name       text collate "C" primary key,
    created_at timestamptz not null,
    instance   uuid,                    -- the process that works; null: none
    until      timestamptz,             -- until when the others wait for it; real time, not the movable clock
    host       text,                    -- where it runs
    pid        integer,
    families   integer not null,        -- which events it takes, for people: bits of families, and a filter
    filter     jsonb not null,
    position   bigint not null,         -- the last event that it has passed
    epoch      bigint not null,         -- the epoch of the log that this position belongs to
    handled    bigint not null default 0,   -- events that its function has got
    moved_at   timestamptz,             -- when the position last moved
    failures   integer not null default 0,  -- failed runs of its function since then
    failure    text                     -- what the last of these said
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

-- What a worker serves in its lanes, stored once for all workers that serve the same.
create table flowfabric.service (
    id           integer generated always as identity primary key,
    kinds        text[],                -- null: every kind, in every version
    versions     integer[],             -- one for each of the kinds, null: none; a kind with several is there several times,
                                        -- first with the version in which its executions begin
    digests      text[],                -- of the handler of each of the kinds; null: not told
    capabilities text[] not null,
    digest       text not null unique
);

-- Which processes sleep, and until when at most: writers notify only if a process sleeps. Real time, not the movable
-- clock. A sleep is a new row, removed on waking: in the order of their ends the rows of the past, dead or not, are never
-- read again.
create unlogged table flowfabric.sleeper (
    lane     text collate "C" not null, -- one row for each lane of a worker; empty for the process that runs the timers
    until    timestamptz not null,
    instance uuid not null,
    service  integer,                   -- of workers
    slots    integer,                   -- of workers: how many executions it can take
    wakes_at timestamptz,               -- of timers: when this process polls again anyway
    namespace text collate "C"          -- of workers: the only one it serves; null: all
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
create index sleeper_by_end on flowfabric.sleeper (lane, until);

-- Which process leads a group of duties, and until when. The others look again when that time has passed.
create unlogged table flowfabric.lead (
    name     text primary key,
    instance uuid not null,
    until    timestamptz not null      -- real time, not the movable clock
) with (fillfactor = 50);

-- The registry --------------------------------------------------------------------------------------------------------

-- The workers, as they registered. A row whose time to live has passed counts as absent, swept or not. A heartbeat changes
-- the last column only, which has no index: pages have room for the new version of every row beside it (HOT).
create table flowfabric.registration (
    namespace          text collate "C" not null,   -- empty: it serves every namespace
    worker_instance_id text collate "C" not null,
    registered_at      timestamptz not null,
    liveness_ttl       interval not null,
    process            uuid,                        -- the process that registered it, the same as in `lead`
    service            integer not null,            -- its kinds with their versions, and its capabilities
    slots              integer,
    pid                integer,
    worker_id          text not null,
    lanes              text[] collate "C" not null,   -- sorted
    host               text,
    package_version    text,
    heartbeat_at       timestamptz not null,
    primary key (namespace, worker_instance_id)
) with (fillfactor = 40, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);

-- The routes with a requirement that no live worker covers, as far as it was noticed: a hint for people, which changes
-- what readers see of waiting executions and nothing else. See workers/judge_routes.sql.
create table flowfabric.uncovered (
    route  integer primary key,
    served text[] collate "C" not null,   -- the namespaces whose own workers cover it, sorted: not theirs
    since  timestamptz not null
);

-- What happened to workers, for lists of one worker; followers find the same in the event log.
create table flowfabric.worker_event (
    seq                bigint generated always as identity primary key,
    occurred_at        timestamptz not null,
    event              text not null,    -- registered, heartbeat, marked_dead, ttl_swept
    namespace          text collate "C" not null,
    worker_instance_id text collate "C" not null,
    worker_id          text not null,
    reason             text              -- of marked_dead; of registered: refreshed, if the worker was registered already
);
create index worker_event_by_time on flowfabric.worker_event (occurred_at);
create index worker_event_by_worker on flowfabric.worker_event (namespace, worker_instance_id, seq);

-- The server ----------------------------------------------------------------------------------------------------------

-- API keys: who may call over HTTP. The secret is 256 random bits; only its digest is stored.
create table flowfabric.api_key (
    id              text collate "C" primary key,   -- part of the key, not secret
    name            text collate "C" not null,      -- who it is, in the audit log and in approvals
    digest          bytea not null,                 -- SHA-256 of the secret
    old_digest      bytea,                          -- after a rotation: of the secret before, accepted
    old_until       timestamptz,                    --   until then
    scopes          text[] not null
        constraint api_key_scopes_known check (scopes <@ array['read', 'submit', 'operate', 'worker', 'admin'] and scopes <> '{}'),
    namespaces      text[],                         -- the only ones it reaches; null: all
    hides_payloads  boolean not null,               -- answers contain no inputs, results, steps, frames or tracebacks
    created_at      timestamptz not null,
    expires_at      timestamptz,
    revoked_at      timestamptz,
    last_used_at    timestamptz                     -- to the minute
);
create unique index api_key_name_is_unique on flowfabric.api_key (name) where revoked_at is null;
create index api_key_by_time on flowfabric.api_key (created_at, id);

-- What operators did over HTTP, whether it succeeded or was refused; written in the transaction of the change.
create table flowfabric.operator_audit (
    seq        bigint generated always as identity primary key,
    at         timestamptz not null,
    actor      text not null,         -- the name of the API key, or of who held a link
    key_id     text,                  -- of the API key; null: a link
    address    text,                  -- of the client
    operation  text not null,
    target     text,                  -- the ids or names it was about
    outcome    text not null,         -- ok, or the code of the refusal
    request_id text
);
create index operator_audit_by_time on flowfabric.operator_audit (at);

-- Answers to requests with an idempotency key, for repeats of the request.
create table flowfabric.kept_answer (
    key_id          text collate "C" not null,    -- the API key that made the request; empty: none
    operation       text collate "C" not null,
    idempotency_key text collate "C" not null,
    request         bytea not null,               -- SHA-256 of what was asked
    holder          uuid not null,                -- the request that is under way, or was answered
    held_until      timestamptz,                  -- while it is under way: until when it counts as such; null: answered
    status          integer,                      -- null and answered: the answer has a secret and was not stored
    headers         text,                         -- JSON
    body            bytea,
    expires_at      timestamptz not null,
    primary key (key_id, operation, idempotency_key)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
create index kept_answer_by_expiry on flowfabric.kept_answer (expires_at);

-- Cancelling or replaying everything that matches, in chunks. A chunk and the progress are one transaction under the
-- row's lock: the process that runs the next one, after a crash or beside another, continues where the last one ended.
create table flowfabric.bulk_job (
    id             uuid primary key,
    operation      text not null constraint bulk_job_operation_known check (operation in ('cancel', 'replay')),
    state          text not null constraint bulk_job_state_known check (state in ('running', 'done', 'stopped', 'failed')),
    reason         text,
    actor          text not null,
    key_id         text,
    created_at     timestamptz not null,
    ended_at       timestamptz,
    -- the filter, as `find` takes it
    namespace      text,
    lanes          text[],
    kinds          text[],
    states         text[] not null,
    tag_key        text,
    tag_value      text,
    flow_id        uuid,
    parent_id      uuid,
    created_from   timestamptz,
    created_before timestamptz not null,
    -- progress
    after_at        timestamptz,           -- where the last chunk ended
    after_id        uuid,
    after_partition integer,
    changed        bigint not null default 0,
    unchanged      bigint not null default 0,     -- had been cancelled before
    refused        bigint not null default 0,
    refusals       jsonb not null default '[]',   -- the first of them
    failure        text                           -- why it failed
);
create index bulk_job_running on flowfabric.bulk_job (created_at, id) where state = 'running';
create index bulk_job_ended on flowfabric.bulk_job (ended_at) where ended_at is not null;

-- Types ---------------------------------------------------------------------------------------------------------------

-- The verdict on one item of a call. `code` is 'ok', 'replayed' or the kind of the refusal.
create type flowfabric.verdict as (
    ordinal            integer,
    code               text,
    detail             text,
    state              text,
    lease_epoch        bigint,
    attempt_id         uuid,
    at                 timestamptz
);

-- The fence of the current lease holder, for an operator's call; or the refusal.
create type flowfabric.held as (
    lease_id uuid, epoch bigint, attempt_id uuid, attempt_index integer, refusal flowfabric.verdict
);

-- The rows a claim took from a route.
create type flowfabric.taken as (partitions integer[], ids uuid[], tids tid[], again boolean);

-- A quota policy and key with its numbers, and how much room they leave; null: no such limit.
create type flowfabric.quota_room as (
    policy_id uuid, key text, rate bigint, cap bigint, span interval, jitter_ms bigint, rate_left bigint, slots_left bigint,
    retry_at timestamptz, floor bigint, low bigint
);

-- The result of the due timers of one kind.
create type flowfabric.due as (partitions integer[], ids uuid[], more boolean, last_due_at timestamptz);

-- A lease with everything the worker needs, and the results that upstreams pass, as columns: the result of every kind
-- of claim.
create type flowfabric.claimed as (
    partition integer, id uuid, handle_kind text, attempt_index integer, attempt_id uuid, attempt_type text,
    lease_id uuid, lease_epoch bigint, lease_expires_at timestamptz, lane text, kind text, namespace text,
    flow_id uuid, priority integer, created_at timestamptz, payload bytea, payload_encoding text, tags jsonb,
    deadline_at timestamptz, attempt_timeout_at timestamptz, retries integer, reclaims integer, replays integer,
    upstreams uuid[], upstream_states text[], upstream_results bytea[], upstream_encodings text[], durability_mode text,
    has_steps boolean);   -- a fork: its first run finds recorded steps

-- The same with a code, ok or the refusal: the result of claims with a grant.
create type flowfabric.granted as (
    code text, detail text,
    partition integer, id uuid, handle_kind text, attempt_index integer, attempt_id uuid, attempt_type text,
    lease_id uuid, lease_epoch bigint, lease_expires_at timestamptz, lane text, kind text, namespace text,
    flow_id uuid, priority integer, created_at timestamptz, payload bytea, payload_encoding text, tags jsonb,
    deadline_at timestamptz, attempt_timeout_at timestamptz, retries integer, reclaims integer, replays integer,
    upstreams uuid[], upstream_states text[], upstream_results bytea[], upstream_encodings text[], durability_mode text,
    has_steps boolean);   -- a fork: its first run finds recorded steps

-- The results that upstreams pass to an execution: one instead of its input, and others beside it.
create type flowfabric.inputs as (
    payload bytea, encoding text, upstreams uuid[], states text[], results bytea[], encodings text[]
);

-- The result of a suspend, beside its verdict.
create type flowfabric.suspended as (
    code text, detail text, state text, lease_epoch bigint, attempt_id uuid, variant text, suspension_id uuid,
    waitpoint_ids uuid[], waitpoint_keys text[], tokens text[], attempt_index integer, lane text,
    worker_instance_id text, lease_ttl_ms bigint
);

-- The execution that a signal is for, as far as its delivery needs it.
create type flowfabric.signalled as (
    partition integer, id uuid, route integer, state text, completed_at timestamptz, flow_id uuid, namespace text,
    tags jsonb, is_parked boolean, max_signals bigint
);

-- Signals as columns, for the evaluation of a condition.
create type flowfabric.recorded as (
    tids tid[], keys text[], names text[], ids uuid[], types text[], identities text[], last_at timestamptz
);

-- The evaluation of a condition: the position of the signal with which it holds, what each leaf counted, and per signal
-- what it did and whether a leaf counted its source; then the keys that leaves counted, each with the number of the leaf.
create type flowfabric.weighed as (
    closer integer, counts integer[], details text[], by_source boolean[], keys text[], key_leaves integer[]
);

-- The state of an attempt's stream, as the next append needs it. See the table frame.
create type flowfabric.stream_head as (
    holder integer, partition integer, id uuid, attempt_index integer, ms bigint, n integer, frames integer, durable integer,
    version integer, marks integer, cap integer, trimmed integer, has_live boolean, folded integer, bound integer,
    live integer, live_floor integer, ema double precision, live_ms bigint, live_cap integer
);

-- The result of a call that uses budgets, for one item: the columns of a verdict, the breach or the soft limit that it is
-- about, the reservation, and what is left of each limited dimension.
create type flowfabric.used as (
    ordinal integer, code text, detail text, state text, lease_epoch bigint, attempt_id uuid, at timestamptz,
    budget_id uuid, dimension text, current bigint, held bigint, bound bigint, asked bigint, overrun bigint,
    reservation_id uuid, reservation_state text, dimensions text[], amounts bigint[],
    left_dimensions text[], left_amounts bigint[]
);

-- A violation that the audit found.
create type flowfabric.violation as (rule text, partition integer, id uuid, detail text);

-- Views ---------------------------------------------------------------------------------------------------------------

-- An execution as readers see it: everything except payload and result, with the columns of its route. One that waits for
-- a worker in a lane that hands out no work, or on a route that no live worker covers, is shown as blocked for that reason;
-- no row is rewritten when a lane is paused or a worker leaves. One that is granted is as good as claimed.
create view flowfabric.execution_view as
select e.partition, e.id, e.created_at, e.namespace, e.creator, e.flow_id, e.idempotency_key, e.payload_encoding,
       e.policy, coalesce(s.budget_ids, '{}') as budget_ids, coalesce(s.quota_ids, '{}') as quota_policy_ids,
       case when h.reason is null then e.state else 'waiting' end as state,
       coalesce(h.reason, e.blocking_reason) as blocking_reason, coalesce(h.detail, e.blocking_detail) as blocking_detail,
       e.pending,
       e.resume_pending, e.lease_lost, e.priority, e.tags, e.attempts, e.retries, e.replays, e.reclaims, e.epoch,
       e.delay_until, e.deadline_at, e.attempt_timeout_at, e.attempt_timeout_left, e.attempt_index, e.attempt_id,
       coalesce(e.attempt_type, case when e.attempts > 0 then 'initial' end) as attempt_type, e.lease_id, w.worker_id,
       w.worker_instance_id,
       (extract(epoch from e.lease_expires_at - coalesce(e.lease_renewed_at, e.attempt_resumed_at, e.attempt_started_at))
        * 1000)::bigint as lease_ttl_ms,
       coalesce(e.attempt_resumed_at, e.attempt_started_at) as lease_acquired_at, e.lease_expires_at,
       coalesce(e.lease_renewed_at, e.attempt_resumed_at, e.attempt_started_at) as lease_renewed_at, e.lease_lost_at, e.lease_revoke_reason, e.result is not null as has_result,
       e.result_encoding, e.failure_reason, e.failure_category, e.cancellation_reason, e.cancelled_by,
       greatest(e.capability_mismatch_at, h.since) as capability_mismatch_at, e.progress_pct, e.progress_message, e.progress_updated_at,
       coalesce(e.started_at, e.attempt_started_at) as started_at,
       e.completed_at, e.transitioned_at,
       greatest(e.transitioned_at, e.mutated_at, e.lease_renewed_at, e.progress_updated_at) as mutated_at,
       r.lane, r.kind, r.capabilities, e.generation, e.node, e.parent_id, e.forked_from, e.forked_before,
       case when e.payload_encoding is null then substring(e.payload for 200) end as arguments,
       (select q.version from flowfabric.route q where q.id = e.pinned) as version,
       case when e.blocking_reason = 'waiting_for_capable_worker' and e.stop_epoch = e.epoch then e.stops end as stops,
       e.suspension_timeout_at, e.hmac_failed_at,
       (select s.waitpoint_ids[1] from flowfabric.suspension s
        where s.partition = e.partition and s.id = e.id and s.closed_at is null) as current_waitpoint_id
from flowfabric.execution e join flowfabric.route r on r.id = e.route left join flowfabric.worker w on w.id = e.worker
left join lateral (select x.budget_ids, x.quota_ids from flowfabric.limit_set x where x.digest = e.limits limit 1) s on true
left join lateral (
    select w.reason,
           case when w.reason = 'paused_by_policy'
                then 'lane ' || r.lane || ' is ' || (select l.state from flowfabric.lane l where l.name = r.lane)
                else concat('no live worker serves ',
                            'version ' || (select q.version from flowfabric.route q where q.id = e.pinned) || ' of ', r.kind,
                            ' in lane ', r.lane, ' with ' || nullif(array_to_string(r.capabilities, ','), '')) end as detail,
           case when w.reason <> 'paused_by_policy' then (
               select u.since from flowfabric.uncovered u where u.route = coalesce(e.stop_route, e.pinned, e.route)) end as since
    from (select case
              when (select l.state from flowfabric.lane l where l.name = r.lane) in ('paused', 'disabled') then 'paused_by_policy'
              when exists (select from flowfabric.uncovered u
                           where u.route = coalesce(e.stop_route, e.pinned, e.route) and e.namespace <> all (u.served))
                  then 'waiting_for_capable_worker' end as reason
          where e.state in ('waiting', 'resumable') and e.blocking_reason = 'waiting_for_worker' offset 0) w
    where w.reason is not null
      and not exists (select from flowfabric.claim_grant g where g.partition = e.partition and g.id = e.id
                      and g.expires_at > (select clock_timestamp() + c.shift from flowfabric.clock c))) h on true;

-- A budget as readers see it: its definition and its newest running numbers.
create view flowfabric.budget_view as
select b.id, b.name, b.scope_type, b.scope_id, b.mode, b.on_hard_limit, b.on_soft_limit,
       (extract(epoch from b.reset_interval) * 1000)::bigint as reset_interval_ms, b.dimensions, b.hard, b.soft,
       coalesce(h.dimensions, '{}') as used_dimensions, coalesce(h.used, '{}') as used, coalesce(h.held, '{}') as held,
       coalesce(h.overrun, '{}') as overrun, h.exhausted, coalesce(h.breaches, 0) as breaches,
       coalesce(h.soft_breaches, 0) as soft_breaches, h.last_breach_at, h.last_breach_dim, b.generation, b.reset_count,
       b.last_reset_at, b.next_reset_at, b.created_at, greatest(h.at, b.updated_at) as updated_at, b.owner_id,
       b.updated_at as defined_at
from flowfabric.budget b
left join lateral (select x.* from flowfabric.budget_head x where x.budget_id = b.id order by x.seq desc limit 1) h on true;
