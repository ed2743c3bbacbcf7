-- sweep: remove expired idempotency records, keys of usage, settled reservations, grants with their slots, watches, unused
-- limit sets, empty flows, segments of the event log and of best-effort
-- frames past their retention, workers that nothing refers to, kept answers, and what the audit log and bulk jobs keep too long.
--
-- Returns  how many grants and keys of usage, and how many rows together with all the others.
-- Roles    work, operate
create or replace function flowfabric.sweep(p_limit integer)
returns table (grants integer, usage_keys integer, total integer)
language plpgsql security definer as $$
declare
    v_now timestamptz := flowfabric.now();
    v_n integer;
    v_sum integer := 0;
begin
    perform flowfabric.require_read_committed();
    delete from flowfabric.idempotency i using (
        select x.ctid as tid from flowfabric.idempotency x where x.expires_at <= v_now
        order by x.expires_at limit p_limit for update skip locked) old
    where i.ctid = old.tid;
    get diagnostics v_n = row_count;
    v_sum := v_n;
    delete from flowfabric.budget_key k where k.ctid = any (array(
        select x.ctid from flowfabric.budget_key x where x.expires_at <= v_now
        order by x.expires_at limit p_limit for update skip locked));
    get diagnostics usage_keys = row_count;
    v_sum := v_sum + usage_keys;
    delete from flowfabric.reservation r where r.ctid = any (array(
        select x.ctid from flowfabric.reservation x where x.settled_at <= v_now - interval '24 hours'
        order by x.settled_at limit p_limit for update skip locked));
    get diagnostics v_n = row_count;
    v_sum := v_sum + v_n;
    with gone as (
        delete from flowfabric.claim_grant g using (
            select x.ctid as tid from flowfabric.claim_grant x where x.expires_at <= v_now
            order by x.expires_at limit p_limit for update skip locked) old
        where g.ctid = old.tid
        returning g.partition, g.id, g.quota_policy_ids, g.expires_at
    ), dead as (
        delete from flowfabric.quota_slot s where s.ctid = any (array(
            select f.tid from gone g
            cross join lateral (select x.ctid as tid from flowfabric.quota_slot x
                                where x.id = g.id and x.partition = g.partition and x.until <= g.expires_at offset 0) f
            where g.quota_policy_ids is not null))
    )
    select count(*) into grants from gone;
    v_sum := v_sum + grants;
    delete from flowfabric.watch w using (
        select x.ctid as tid from flowfabric.watch x where x.until < clock_timestamp() - interval '1 minute'
        limit p_limit for update skip locked) old
    where w.ctid = old.tid;
    get diagnostics v_n = row_count;
    v_sum := v_sum + v_n;
    delete from flowfabric.sleeper s where s.ctid = any (array(
        select x.ctid from flowfabric.sleeper x where x.until < clock_timestamp() - interval '1 minute' limit p_limit));
    delete from flowfabric.follower f where f.ctid = any (array(
        select x.ctid from flowfabric.follower x where x.until < clock_timestamp() - interval '1 minute' limit p_limit));
    delete from flowfabric.kept_answer k where k.ctid = any (array(
        select x.ctid from flowfabric.kept_answer x where x.expires_at <= v_now
        order by x.expires_at limit p_limit for update skip locked));
    get diagnostics v_n = row_count;
    v_sum := v_sum + v_n;
    delete from flowfabric.operator_audit a where a.ctid = any (array(
        select x.ctid from flowfabric.operator_audit x
        where x.at <= v_now - (select d.operator_audit_retention from flowfabric.deployment d)
        order by x.at limit p_limit for update skip locked));
    get diagnostics v_n = row_count;
    v_sum := v_sum + v_n;
    delete from flowfabric.bulk_job b where b.ctid = any (array(
        select x.ctid from flowfabric.bulk_job x
        where x.ended_at <= v_now - (select d.failure_retention from flowfabric.deployment d)
        order by x.ended_at limit p_limit for update skip locked));
    get diagnostics v_n = row_count;
    v_sum := v_sum + v_n;
    -- Flows that never had a member.
    delete from flowfabric.flow f using (
        select x.ctid as tid from flowfabric.flow x, flowfabric.deployment d
        where x.node_count = 0 and x.last_mutation_at <= v_now - d.failure_retention
        limit p_limit for update of x skip locked) old
    where f.ctid = old.tid;
    get diagnostics v_n = row_count;
    total := v_sum + v_n + flowfabric.purge_keys(v_now) + flowfabric.trim_events(v_now)
        + flowfabric.trim_live(v_now) + flowfabric.forget_workers(v_now, p_limit) + flowfabric.sweep_limit_sets(v_now, p_limit);
    return next;
end;
$$;
