-- audit: what must hold of every execution, as a query that finds nothing
--
-- Called by the audit duty for one partition at a time and by the tests for all. Reports, repairs nothing.
-- Answers  one row per violation. Event counts hold inside the retention of the log; p_events asks for them.
create or replace function flowfabric.audit(p_partition integer, p_events boolean)
returns table (rule text, partition integer, id uuid, detail text)
language plpgsql stable security definer as $$
#variable_conflict use_column
declare
    v_deployment flowfabric.deployment;
    v_now timestamptz := flowfabric.now();
begin
    select d.* into v_deployment from flowfabric.deployment d;

    return query
    with e as (
        select x.* from flowfabric.execution x where p_partition is null or x.partition = p_partition
    ), pointed as materialized (
        select t.kind, u.partition, u.id, min(t.due_at) as due_at
        from flowfabric.timer t cross join lateral unnest(t.partitions, t.ids) as u (partition, id)
        where p_partition is null or u.partition = p_partition
        group by t.kind, u.partition, u.id
    ), wrong as (
        -- the stored facts fit the state
        select 'state_facts' as rule, e.partition, e.id, concat_ws(' ', e.state, e.blocking_reason, e.pending,
                                                                   e.resume_pending, e.lease_lost) as detail
        from e where not coalesce(case
            when e.state in ('completed', 'failed', 'cancelled', 'expired', 'skipped') then
                num_nonnulls(e.blocking_reason, e.blocking_detail, e.pending, e.lease_lost, e.delay_until,
                             e.attempt_timeout_at, e.attempt_timeout_left) = 0 and not e.resume_pending
                and e.completed_at is not null
            when e.state = 'active' and e.lease_lost is null then
                num_nonnulls(e.blocking_reason, e.blocking_detail, e.pending, e.delay_until) = 0
                and not e.resume_pending
                and num_nulls(e.lease_id, e.worker_id, e.worker_instance_id, e.lease_ttl_ms, e.lease_acquired_at,
                              e.lease_expires_at, e.lease_renewed_at, e.attempt_id) = 0
            when e.state = 'active' then
                e.blocking_reason = 'waiting_for_worker' and e.blocking_detail <> '' and e.pending = 'interrupted'
                and not e.resume_pending and e.lease_lost_at is not null and e.lease_id is not null
            when e.state in ('waiting', 'resumable') then
                e.lease_lost is null and e.pending is not null and e.delay_until is null
                and (e.state = 'resumable') = (e.resume_pending and e.blocking_reason = 'waiting_for_worker')
                and ((e.blocking_reason = 'waiting_for_worker' and e.blocking_detail is null)
                     or (e.blocking_reason in ('waiting_for_capable_worker', 'waiting_for_locality_match',
                             'paused_by_policy', 'paused_by_operator', 'paused_by_flow_cancel')
                         and e.blocking_detail <> ''))
            when e.state = 'delayed' then
                e.lease_lost is null and e.delay_until is not null and e.blocking_detail <> ''
                and (e.blocking_reason, e.pending) in (
                    ('waiting_for_delay', 'first'), ('waiting_for_delay', 'interrupted'),
                    ('waiting_for_retry_backoff', 'retry'), ('waiting_for_resume_delay', 'interrupted'))
            when e.state = 'rate_limited' then
                e.lease_lost is null and e.pending is not null
                and e.blocking_reason in ('waiting_for_budget', 'waiting_for_quota')
            when e.state = 'waiting_children' then
                e.lease_lost is null and e.blocking_reason = 'waiting_for_children' and e.blocking_detail <> ''
                and e.pending is not null
            when e.state = 'suspended' then e.lease_lost is null and e.pending = 'interrupted'
        end, false)
        union all
        select 'facts_known', e.partition, e.id, concat_ws(' ', e.pending, e.lease_lost, e.priority) from e
        where e.pending not in ('first', 'retry', 'replay', 'interrupted') or e.lease_lost not in ('expired', 'revoked')
           or e.priority not between 0 and 9000
        union all
        select 'completed_at', e.partition, e.id, e.state from e
        where (e.completed_at is not null) <> (e.state in ('completed', 'failed', 'cancelled', 'expired', 'skipped'))
        union all
        select 'pending_agrees_with_attempts', e.partition, e.id, e.pending || ' ' || e.attempts from e
        where (e.pending = 'first' and e.attempts > 0) or (e.pending in ('retry', 'interrupted') and e.attempts = 0)
        union all
        select 'times_ordered', e.partition, e.id, null from e
        where e.transitioned_at > e.mutated_at or e.created_at > e.transitioned_at
        union all
        select 'lane_registered', e.partition, e.id, e.route::text from e
        where not exists (select from flowfabric.route r join flowfabric.lane l on l.name = r.lane where r.id = e.route)
        -- a ready row exists exactly where a claim may look, in its place, not below the floor
        union all
        select 'ready_row', e.partition, e.id, e.state || ' has ' || (select count(*) from flowfabric.ready r where r.id = e.id)
        from e where (select count(*) from flowfabric.ready r
                      where r.partition = e.partition and r.id = e.id and r.route = e.route
                        and r.rank = flowfabric.rank_of(e.priority) and r.created_at = e.created_at
                        and r.deadline_at is not distinct from e.deadline_at
                        and (r.available_at is not null) = (e.state = 'active'))
            <> case when (e.state in ('waiting', 'resumable')
                          and e.blocking_reason in ('waiting_for_worker', 'waiting_for_capable_worker'))
                      or (e.state = 'active' and e.lease_lost is not null   -- owed a cancel, it is not for anybody
                          and not exists (select from flowfabric.cancel_member c where c.partition = e.partition and c.id = e.id))
                    then 1 else 0 end
        union all
        select 'ready_orphan', r.partition, r.id, null from flowfabric.ready r
        where (p_partition is null or r.partition = p_partition)
          and not exists (select from flowfabric.execution x where x.partition = r.partition and x.id = r.id)
        union all
        select 'ready_below_floor', r.partition, r.id, null from flowfabric.ready r
        where (p_partition is null or r.partition = p_partition)
          and exists (select from flowfabric.ready_floor f where f.route = r.route)
          and not exists (select from flowfabric.ready_floor f where f.route = r.route
                          and (f.rank, f.created_at, f.id) <= (r.rank, r.created_at, r.id))
        union all
        select 'blocked_row', e.partition, e.id, e.blocking_reason from e
        where (select count(*) from flowfabric.blocked b
               where b.partition = e.partition and b.id = e.id and b.created_at = e.created_at
                 and b.blocking_reason = e.blocking_reason)
            <> case when e.state not in ('active', 'suspended') and e.blocking_reason in ('waiting_for_budget', 'waiting_for_quota',
                         'waiting_for_capable_worker', 'paused_by_operator', 'paused_by_policy') then 1 else 0 end
        union all
        select 'blocked_orphan', b.partition, b.id, b.blocking_reason from flowfabric.blocked b
        where (p_partition is null or b.partition = p_partition)
          and not exists (select from flowfabric.execution x where x.partition = b.partition and x.id = b.id
                          and x.blocking_reason = b.blocking_reason)
        union all
        select 'unsuccessful_row', e.partition, e.id, e.state from e
        where (select count(*) from flowfabric.unsuccessful w
               where w.state in ('failed', 'cancelled', 'expired', 'skipped') and w.created_at = e.created_at
                 and w.id = e.id and w.partition = e.partition)
            <> case when e.state in ('failed', 'cancelled', 'expired', 'skipped') then 1 else 0 end
        union all
        select 'tag_rows', e.partition, e.id, e.tags::text from e
        where (select count(*) from jsonb_object_keys(coalesce(e.tags, '{}')))
            <> (select count(*) from flowfabric.tag t join jsonb_each_text(coalesce(e.tags, '{}')) k
                    on t.digest = flowfabric.tag_digest(k.key, k.value)
                where t.created_at = e.created_at and t.id = e.id and t.partition = e.partition)
           or (p_partition is null   -- has no index: only for all at once
               and (select count(*) from flowfabric.tag t where t.id = e.id and t.partition = e.partition)
                   <> (select count(*) from jsonb_object_keys(coalesce(e.tags, '{}'))))
        -- every time that will come has a timer that is not later
        union all
        select 'timer_' || o.kind, o.partition, o.id, o.own_at::text
        from (select k.kind, e.partition, e.id,
                     flowfabric.own_time(k.kind, e.*::flowfabric.execution, v_deployment) as own_at
              from e cross join (values ('lease'), ('attempt'), ('deadline'), ('delay'), ('suspension'), ('retention')) k (kind)) o
        left join pointed p on p.kind = o.kind and p.partition = o.partition and p.id = o.id
        -- A retention that was shortened since applies to what ends from then on.
        where o.own_at is not null and (p.due_at is null or (p.due_at > o.own_at and o.kind <> 'retention'))
        union all
        select 'timer_waitpoint', w.partition, w.id, w.expires_at::text from flowfabric.waitpoint w
        left join pointed p on p.kind = 'waitpoint' and p.partition = w.partition and p.id = w.id
        where (p_partition is null or w.partition = p_partition) and w.state = 'pending'
          and w.expires_at < flowfabric.far_date() and (p.due_at is null or p.due_at > w.expires_at)
        -- attempts: no gaps, the counter counts them, at most the latest is open
        union all
        select 'attempt_history', e.partition, e.id, e.attempts || ' counted' from e
        where (select coalesce(array_agg(a.attempt_index order by a.attempt_index), '{}') from flowfabric.attempt a
               where a.partition = e.partition and a.id = e.id)
            <> (select coalesce(array_agg(i), '{}') from generate_series(0, e.attempts - 2) i)
           or (e.attempts > 0 and (e.attempt_index is distinct from e.attempts - 1 or e.attempt_id is null))
           or (e.attempts = 0 and num_nonnulls(e.attempt_index, e.attempt_id, e.lease_id) > 0)
        union all
        select 'attempt_open', e.partition, e.id, e.state || ' ' || e.attempt_lifecycle from e
        where e.attempts > 0 and e.attempt_lifecycle <> all (case
            when e.state = 'active' then array['started']
            when e.pending = 'interrupted' then array['suspended']
            else array['ended_success', 'ended_failure', 'ended_cancelled'] end)
        union all
        select 'attempt_history_ended', a.partition, a.id, a.attempt_index::text from flowfabric.attempt a
        where (p_partition is null or a.partition = p_partition)
          and (a.attempt_lifecycle not in ('ended_success', 'ended_failure', 'ended_cancelled', 'interrupted_reclaimed')
               or a.ended_at is null or a.disposition is null)
        union all
        select 'attempt_orphan', a.partition, a.id, a.attempt_index::text from flowfabric.attempt a
        where (p_partition is null or a.partition = p_partition)
          and not exists (select from flowfabric.execution x where x.partition = a.partition and x.id = a.id)
        union all
        select 'attempt_identity', e.partition, e.id, null from e
        where exists (select from flowfabric.attempts_of(e.partition, e.id) a
                      group by () having count(*) <> count(distinct a.attempt_id)
                                      or count(*) <> count(distinct a.lease_id)
                                      or count(*) <> count(distinct a.lease_epoch))
        union all
        select 'epoch_order', e.partition, e.id, e.epoch::text from e
        where exists (select from (select a.lease_epoch, lag(a.lease_epoch) over (order by a.attempt_index) as before
                                   from flowfabric.attempts_of(e.partition, e.id) a) w
                      where w.lease_epoch <= coalesce(w.before, 0) or w.lease_epoch > e.epoch)
        union all
        select 'reclaims_counted', e.partition, e.id, e.reclaims::text from e
        where e.reclaims <> (select count(*) from flowfabric.attempts_of(e.partition, e.id) a where a.attempt_type = 'reclaim')
        union all
        select 'retries_counted', e.partition, e.id, e.retries::text from e
        where e.retries <> (select count(*) from flowfabric.attempts_of(e.partition, e.id) a
                            where a.disposition = 'retry_scheduled')
        -- what waits for nothing but another execution is waited for by a row; no row is without an owner
        union all
        select 'parked_for_ever', e.partition, e.id, null from e
        where flowfabric.is_parked(e.*::flowfabric.execution) and e.delay_until >= flowfabric.far_date()
          and e.blocking_detail = 'waiting for another execution'
          and not exists (select from flowfabric.waiter w join flowfabric.execution c on c.partition = w.child_partition
                          and c.id = w.child_id and c.completed_at is null
                          where w.partition = e.partition and w.id = e.id)
          and not exists (select from flowfabric.waiter w join flowfabric.waitpoint c on c.partition = w.child_partition
                          and c.waitpoint_id = w.child_id and c.state = 'pending'
                          where w.partition = e.partition and w.id = e.id)
          and not exists (select from pointed p where p.kind = 'parked' and p.partition = e.partition and p.id = e.id)
        union all
        select 'waiter_missed', w.partition, w.id, null from flowfabric.waiter w
        join flowfabric.execution x on x.partition = w.partition and x.id = w.id
        left join flowfabric.execution c on c.partition = w.child_partition and c.id = w.child_id
        where (p_partition is null or w.partition = p_partition) and flowfabric.is_parked(x)
          and (c.id is null or c.completed_at is not null)
          and not exists (select from flowfabric.waitpoint p where p.partition = w.child_partition
                          and p.waitpoint_id = w.child_id and p.state = 'pending')
          and not exists (select from pointed p where p.kind = 'parked' and p.partition = w.partition and p.id = w.id)
        union all
        select 'step_orphan', s.partition, s.id, s.name from flowfabric.step s
        left join flowfabric.execution x on x.partition = s.partition and x.id = s.id
        where (p_partition is null or s.partition = p_partition) and (x.id is null or s.generation > x.generation)
        -- suspensions: open exactly while suspended, with waitpoints that are all active and all its own
        union all
        select 'suspension_open', e.partition, e.id, e.state from e
        where (e.state = 'suspended') <> exists (
            select from flowfabric.suspension s where s.partition = e.partition and s.id = e.id and s.closed_at is null)
        union all
        select 'suspension_facts', s.partition, s.id, s.suspension_id::text
        from flowfabric.suspension s join e on e.partition = s.partition and e.id = s.id
        where s.closed_at is null and (
            e.suspension_timeout_at is distinct from s.timeout_at or e.attempt_timeout_at is not null
            or e.attempt_index <> s.attempt_index or e.attempt_id <> s.attempt_id or not e.has_waitpoints
            or e.blocking_reason <> flowfabric.suspension_blocks(s.reason_code) or s.close_reason is not null)
        union all
        select 'suspension_waitpoints', s.partition, s.id, s.suspension_id::text from flowfabric.suspension s
        where (p_partition is null or s.partition = p_partition)
          and (select coalesce(array_agg(w.waitpoint_id order by u.place), '{}')
               from unnest(s.waitpoint_ids) with ordinality as u (waitpoint_id, place)
               join flowfabric.waitpoint w on w.partition = s.partition and w.waitpoint_id = u.waitpoint_id and w.id = s.id
                    and w.suspension_id = s.suspension_id
                    and w.state = case when s.closed_at is null then 'active' else 'closed' end) <> s.waitpoint_ids
        union all
        select 'waitpoint_state', w.partition, w.id, w.waitpoint_id || ' ' || w.state
        from flowfabric.waitpoint w left join flowfabric.execution x on x.partition = w.partition and x.id = w.id
        where (p_partition is null or w.partition = p_partition) and not coalesce(case w.state
            when 'pending' then x.completed_at is null and x.has_waitpoints and w.suspension_id is null and w.closed_at is null
                 and w.attempt_index = x.attempt_index and w.expires_at is not null
            when 'active' then exists (select from flowfabric.suspension s where s.partition = w.partition and s.id = w.id
                                       and s.closed_at is null and w.waitpoint_id = any (s.waitpoint_ids))
            when 'closed' then w.closed_at is not null and w.close_reason <> ''
            when 'expired' then w.closed_at is not null and w.close_reason = 'never_committed' and w.suspension_id is null
            end and x.id is not null, false)
        union all
        select 'condition_held', s.partition, s.id, s.suspension_id::text from flowfabric.suspension s
        where (p_partition is null or s.partition = p_partition)
          and case when s.closed_at is null
                   then flowfabric.first_holding(s.resume_condition, flowfabric.recorded_on(s.partition, s.waitpoint_ids, false)) is not null
                   when s.close_reason = 'resumed'
                   then (flowfabric.recorded_on(s.partition, s.waitpoint_ids, false)).ids[flowfabric.first_holding(
                            s.resume_condition, flowfabric.recorded_on(s.partition, s.waitpoint_ids, false))]
                        is distinct from s.closer_signal_id
                        or s.closer_signal_id <> all (coalesce(s.satisfier_signal_ids, '{}')) end
        union all
        select 'satisfier_unknown', s.partition, s.id, s.suspension_id::text from flowfabric.suspension s
        where (p_partition is null or s.partition = p_partition) and exists (
            select from unnest(s.satisfier_signal_ids) as u (signal_id)
            left join flowfabric.signal g on g.partition = s.partition and g.id = s.id and g.signal_id = u.signal_id
            where g.signal_id is null or g.is_dropped)
        union all
        select 'signal_order', g.partition, g.id, count(*)::text from flowfabric.signal g
        where p_partition is null or g.partition = p_partition
        group by g.partition, g.id
        having count(*) <> max(g.ordinal) or min(g.ordinal) <> 1
            or not exists (select from flowfabric.execution x where x.partition = g.partition and x.id = g.id)
        union all
        select 'signal_count', w.partition, w.id, w.waitpoint_id::text from flowfabric.waitpoint w
        where (p_partition is null or w.partition = p_partition)
          and (w.signal_count, w.dropped_signal_count) <> (
              select count(*), count(*) filter (where g.is_dropped) from flowfabric.signal g
              where g.partition = w.partition and g.waitpoint_id = w.waitpoint_id and g.source_type <> 'system')
        union all
        select 'keystore', null::integer, null::uuid, k.kid from flowfabric.keystore k
        where not case k.state when 'current' then k.expires_at is null and k.inner_key is not null
                               when 'verifying' then k.expires_at is not null and k.inner_key is not null
                               else k.inner_key is null and k.outer_key is null end
        -- grants
        union all
        select 'grant_state', g.partition, g.id, g.kind from flowfabric.claim_grant g
        left join flowfabric.execution x on x.partition = g.partition and x.id = g.id
        where (p_partition is null or g.partition = p_partition) and g.expires_at > v_now
          and not coalesce(case g.kind
              when 'claim' then x.state in ('waiting', 'resumable') and x.blocking_reason = 'waiting_for_worker'
              else x.state = 'active' and x.lease_lost is not null end, false)
        union all
        select 'grant_hides', r.partition, r.id, null from flowfabric.ready r
        where (p_partition is null or r.partition = p_partition) and r.granted_until > v_now
          and not exists (select from flowfabric.claim_grant g where g.partition = r.partition and g.id = r.id
                          and g.expires_at = r.granted_until)
    )
    select w.rule, w.partition, w.id, w.detail from wrong w;
    return query select f.rule, f.partition, f.id, f.detail from flowfabric.audit_flows(p_partition, p_events) f;

    if p_events then
        return query
        with v as (
            select x.* from flowfabric.event x where p_partition is null or x.partition = p_partition
        ), e as (
            select x.* from flowfabric.execution x where p_partition is null or x.partition = p_partition
        ), lease as (
            select v.*, lag(v.lease_type) over w as before, lag(v.lease_epoch) over w as epoch_before,
                   row_number() over w as n
            from v where v.lease_type is not null
            window w as (partition by v.partition, v.id order by v.seq)
        )
        -- one completion event per terminal transition; each replay undid one
        select 'completion_events', e.partition, e.id,
               (select string_agg(v.outcome, ',' order by v.seq) from v where v.partition = e.partition and v.id = e.id)
        from e where (select count(*) from v where v.partition = e.partition and v.id = e.id and v.outcome is not null)
                     <> e.replays + case when e.completed_at is null then 0 else 1 end
        union all
        select 'last_outcome', e.partition, e.id, e.state from e
        where e.completed_at is not null
          and (select v.outcome from v where v.partition = e.partition and v.id = e.id and v.outcome is not null
               order by v.seq desc limit 1) is distinct from case e.state when 'completed' then 'success' else e.state end
        union all
        select 'replayed_events', e.partition, e.id, e.replays::text from e
        where (select count(*) from v where v.partition = e.partition and v.id = e.id and v.operator_type = 'replayed')
              <> e.replays
        -- leases: every epoch is acquired once (or spent by a suspension), in order, and given back before the next
        union all
        select 'lease_epochs', e.partition, e.id, e.epoch::text from e
        where (select coalesce(array_agg(v.lease_epoch + (v.lease_type = 'revoked')::integer order by v.seq), '{}') from v
               where v.partition = e.partition and v.id = e.id
                 and (v.lease_type in ('acquired', 'reclaimed') or (v.lease_type = 'revoked' and v.reason = 'suspend')))
              <> (select coalesce(array_agg(i), '{}') from generate_series(1, e.epoch) i)
        union all
        select 'lease_history', l.partition, l.id, coalesce(l.before, '-') || ' then ' || l.lease_type
        from lease l where not case
            when l.lease_type in ('acquired') then l.before is null or l.before = 'revoked'
                 -- it was over with the execution or the attempt before anybody took it back
                 or (l.before = 'expired' and not exists (select from flowfabric.attempts_of(l.partition, l.id) a
                         where a.lease_epoch = l.epoch_before and a.disposition = 'reclaimed'))
            when l.lease_type = 'reclaimed' then l.before in ('expired', 'revoked')
            when l.lease_type = 'renewed' then l.before in ('acquired', 'reclaimed', 'renewed') and l.epoch_before = l.lease_epoch
            when l.lease_type = 'expired' then l.before in ('acquired', 'reclaimed', 'renewed') and l.epoch_before = l.lease_epoch
            when l.lease_type = 'revoked' then l.before in ('acquired', 'reclaimed', 'renewed')
                 or (l.before in ('expired', 'revoked') and l.reason = 'max_reclaims_exceeded')
            else false end
        union all
        select 'leased_last_event', e.partition, e.id, e.state from e
        where e.epoch > 0 and (e.state = 'active' and e.lease_lost is null)
              is distinct from coalesce((select l.lease_type in ('acquired', 'reclaimed', 'renewed') from lease l
                                where l.partition = e.partition and l.id = e.id order by l.seq desc limit 1), false)
        union all
        select 'signal_events', e.partition, e.id, null from e
        where (select count(*) from v where v.partition = e.partition and v.id = e.id and v.signal_effect <> 'deduped')
           <> (select count(*) from flowfabric.signal g where g.partition = e.partition and g.id = e.id and g.source_type <> 'system')
        union all
        select 'event_namespace', v.partition, v.id, v.namespace from v
        join e on e.partition = v.partition and e.id = v.id where v.namespace is distinct from e.namespace;
    end if;
end;
$$;
