-- Tasks: durable steps, waiting for another execution's end, recurring schedules.

-- A success that is replayed begins a new generation, whose steps start from nothing.
alter table flowfabric.execution add column generation integer not null default 0;

-- What failed or expired is kept longer, unless its policy says how long.
alter table flowfabric.deployment add column failure_retention interval not null default '14 days';

-- What a handler did once and need not do again, by name; each kind of thing has names of its own. `run` counts retries and replays: a failure is remembered for its
-- run only, a success for the generation.
create table flowfabric.step (
    partition   integer not null,
    id          uuid not null,
    generation  integer not null,
    name        text collate "C" not null,
    n           integer not null,       -- how often the name was used before in this run
    kind        text not null constraint step_kind_known check (kind in ('step', 'now', 'sleep', 'submit', 'result')),
    run         integer not null,
    attempt_index integer not null,
    result      bytea,
    encoding    text,
    error       jsonb,                  -- set when the step failed, or the execution waited for did
    at          timestamptz,            -- of now: the time; of sleep: when it ends
    child_partition integer,            -- of submit: the execution made
    child_id    uuid,
    seconds     double precision,
    recorded_at timestamptz not null,
    primary key (partition, id, generation, kind, name, n)
);

-- Who waits for whose end. Consumed by whatever ends the execution waited for.
create table flowfabric.waiter (
    partition       integer not null,
    id              uuid not null,
    child_partition integer not null,
    child_id        uuid not null,
    primary key (partition, id, child_partition, child_id)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
create index waiter_by_child on flowfabric.waiter (child_partition, child_id);

-- Which processes want to be told that an execution ended. A hint: who watches also looks for itself.
create unlogged table flowfabric.watch (
    partition integer not null,
    id        uuid not null,
    instance  uuid not null,
    until     timestamptz not null,     -- real time, not the movable clock
    primary key (partition, id, instance)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

-- Recurring work. Whoever moves next_at on from the value it read creates what is due: so nothing fires twice.
create table flowfabric.schedule (
    name             text collate "C" primary key,
    kind             text not null,
    timing           jsonb not null,
    catch_up         text not null constraint schedule_catch_up_known check (catch_up in ('skip', 'one', 'all')),
    payload          bytea not null,
    payload_encoding text,
    options          jsonb not null,
    paused           boolean not null default false,
    next_at          timestamptz,       -- null: never again
    last_at          timestamptz,       -- the latest time it fired for
    last_partition   integer,
    last_id          uuid,
    created_at       timestamptz not null,
    updated_at       timestamptz not null
);
create index schedule_due on flowfabric.schedule (next_at) where not paused;

create or replace view flowfabric.execution_view as
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
       r.lane, r.kind, r.capabilities, e.generation
from flowfabric.execution e join flowfabric.route r on r.id = e.route;

-- A lease and what is needed to do the work: what every way of claiming answers.
create type flowfabric.claimed as (
    partition integer, id uuid, handle_kind text, attempt_index integer, attempt_id uuid, attempt_type text,
    lease_id uuid, lease_epoch bigint, lease_expires_at timestamptz, lane text, kind text, namespace text,
    flow_id uuid, priority integer, created_at timestamptz, payload bytea, payload_encoding text, tags jsonb,
    deadline_at timestamptz, attempt_timeout_at timestamptz, retries integer, reclaims integer, replays integer);
