-- attempts_of: every attempt of one execution, the history and the latest.
create or replace function flowfabric.attempts_of(p_partition integer, p_id uuid)
returns setof flowfabric.attempt
language sql stable as $$
    select a.* from flowfabric.attempt a where a.partition = p_partition and a.id = p_id
    union all
    select (flowfabric.latest_attempt(e, w)).*
    from flowfabric.execution e left join flowfabric.worker w on w.id = e.worker
    where e.partition = p_partition and e.id = p_id and e.attempts > 0
$$;

-- latest_attempt: the latest attempt of an execution, in the form of its history.
create or replace function flowfabric.latest_attempt(e flowfabric.execution, w flowfabric.worker)
returns flowfabric.attempt
language sql immutable as $$
    select row(e.partition, e.id, e.attempt_index, e.attempt_id, coalesce(e.attempt_type, 'initial'),
               flowfabric.lifecycle_of(e.state, e.disposition),
               e.attempt_started_at, e.attempt_resumed_at, e.attempt_suspended_at,
               coalesce(e.attempt_ended_at, e.completed_at),
               e.lease_id, e.epoch, w.worker_id, w.worker_instance_id, e.attempt_failure_reason,
               e.attempt_failure_category, e.attempt_policy, e.retry_reason, e.previous_attempt_index,
               e.replay_reason, e.replay_requested_by, e.replayed_from_attempt_index, e.reclaim_reason,
               e.disposition, e.retry_at, e.lease_lost_at,
               flowfabric.lost_as(e.lease_lost_at, e.lease_revoke_reason))::flowfabric.attempt
$$;

-- lost_as: how the lease of the latest attempt was lost; null: it was not. Later changes of the execution do not
-- change it.
create or replace function flowfabric.lost_as(p_lost_at timestamptz, p_revoke_reason text) returns text
language sql immutable as $$
    select case when p_lost_at is null then null when p_revoke_reason is null then 'expired' else 'revoked' end
$$;

-- lifecycle_of: how far the latest attempt of an execution is, from how it ended.
create or replace function flowfabric.lifecycle_of(p_state text, p_disposition text) returns text
language sql immutable as $$
    select case p_disposition when 'completed' then 'ended_success'
                              when 'terminal_failed' then 'ended_failure' when 'retry_scheduled' then 'ended_failure'
                              when 'expired' then 'ended_failure'
                              when 'cancelled' then 'ended_cancelled' when 'skipped' then 'ended_cancelled'
                              when 'reclaimed' then 'interrupted_reclaimed'
                              else case p_state when 'active' then 'started' else 'suspended' end end
$$;
