-- Duties: actions at a due time. One driver for all kinds; they differ in the time (own_time) and in the action
-- (act).

-- own_time: when this execution is really due for a kind of timer; null when it no longer is.
create or replace function flowfabric.own_time(p_kind text, e flowfabric.execution, d flowfabric.deployment)
returns timestamptz
language sql immutable as $$
    select case p_kind
        when 'lease' then case when e.state = 'active' and e.lease_lost is null then e.lease_expires_at end
        when 'attempt' then case when e.state = 'active' then e.attempt_timeout_at end
        when 'deadline' then case when e.completed_at is null then e.deadline_at end
        when 'delay' then case when e.state = 'delayed' or e.is_parked or e.stop_route is not null then e.delay_until end
        when 'parked' then case when e.is_parked and e.state = 'waiting_children' then timestamptz '-infinity' end
        when 'suspension' then case when e.state = 'suspended' then e.suspension_timeout_at end
        when 'waitpoint' then case when e.has_waitpoints and e.completed_at is null then timestamptz '-infinity' end
        when 'retention' then e.completed_at + flowfabric.retention_of(e.state, e.policy, d)
    end
$$;
