-- Suspension: waitpoints, the suspensions that bind them, and the signals that reach them.

alter table flowfabric.execution
    add column has_waitpoints boolean not null default false,   -- ever: whoever ends an attempt then looks for them
    add column suspension_timeout_at timestamptz,               -- of the open suspension, for the timers
    add column hmac_failed_at timestamptz;                      -- a signal came with a token that is not ours

-- A place where signals arrive. The token is not stored: it is signed again from the keystore when it is asked for.
create table flowfabric.waitpoint (
    partition             integer not null,
    waitpoint_id          uuid not null,
    id                    uuid not null,        -- the execution
    attempt_index         integer not null,
    suspension_id         uuid,                 -- set when it becomes active
    waitpoint_key         text not null,
    token_kid             text not null,
    state                 text not null,        -- pending, active, closed, expired
    outlives_attempt      boolean not null,     -- goes over to the next attempt instead of closing with its own
    required_signal_names text[] not null default '{}',
    created_at            timestamptz not null,
    activated_at          timestamptz,
    expires_at            timestamptz,          -- of a pending one: its own; of an active one: when its suspension ends
    signal_count          integer not null default 0,
    matched_signal_count  integer not null default 0,
    dropped_signal_count  integer not null default 0,
    last_signal_at        timestamptz,
    satisfied_at          timestamptz,
    closed_at             timestamptz,
    close_reason          text,
    primary key (partition, waitpoint_id)
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
    resume_policy     jsonb not null,
    suspended_at      timestamptz not null,
    timeout_at        timestamptz,
    timeout_behavior  text,
    idempotency_key   text,
    replay_until      timestamptz,              -- a repeated call is answered with this row until then
    is_early          boolean not null,         -- was satisfied by what had arrived before; never open
    last_signal_at    timestamptz,
    satisfied_at      timestamptz,
    closed_at         timestamptz,
    close_reason      text,
    trigger_type      text,
    closer_signal_id  uuid,
    satisfier_signal_ids uuid[],
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
    created_at       timestamptz not null,
    accepted_at      timestamptz not null,
    observed_effect  text not null,
    match_detail     text not null,
    is_dropped       boolean not null default false,   -- only its identity is kept, so that a repetition is recognised
    primary key (partition, id, ordinal)
);
create unique index signal_by_id on flowfabric.signal (partition, id, signal_id);
create index signal_by_waitpoint on flowfabric.signal (partition, waitpoint_id, ordinal);
create index signal_by_key on flowfabric.signal (partition, waitpoint_id, idempotency_key)
    where idempotency_key is not null;

alter table flowfabric.event add column signal_effect text;

-- What `wait` was recorded as: the waitpoints of a task's wait, and what came of it.
alter table flowfabric.step drop constraint step_kind_known;
alter table flowfabric.step add constraint step_kind_known
    check (kind in ('step', 'now', 'sleep', 'submit', 'result', 'wait'));
alter table flowfabric.step add column waitpoint_ids uuid[];

-- What a suspend came to, beside its verdict.
create type flowfabric.suspended as (
    code text, detail text, state text, lease_epoch bigint, attempt_id uuid, variant text, suspension_id uuid,
    waitpoint_ids uuid[], waitpoint_keys text[], tokens text[], attempt_index integer, lane text,
    worker_instance_id text, lease_ttl_ms bigint
);

-- Signals as columns, for the evaluation of a condition.
create type flowfabric.recorded as (
    ordinals integer[], keys text[], names text[], ids uuid[], types text[], identities text[], last_at timestamptz
);

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
       r.lane, r.kind, r.capabilities, e.generation,
       e.suspension_timeout_at, e.hmac_failed_at,
       (select s.waitpoint_ids[1] from flowfabric.suspension s
        where s.partition = e.partition and s.id = e.id and s.closed_at is null) as current_waitpoint_id
from flowfabric.execution e join flowfabric.route r on r.id = e.route;
