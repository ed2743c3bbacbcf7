-- reconcile_quotas: remove aged window entries and dead slots, one page of policies
--
-- The duty `quota_reconciler`. Repairs what crashed callers of check_admission left behind, and slots of grants that expired.
-- Reads executions without locks. Entries are kept as long as check_admission says.
-- Takes    p_after: the last policy of the page before.
-- Returns  how many entries and slots were removed, how many heads without any, and the last policy; null: it was the last page.
-- Roles    work, operate
create or replace function flowfabric.reconcile_quotas(p_after uuid, p_limit integer)
returns table (entries integer, slots integer, heads integer, last_policy uuid)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz := flowfabric.now();
    v_policies uuid[];
    v_n integer;
    v_policy uuid;
begin
    perform flowfabric.require_read_committed();
    entries := 0; slots := 0; heads := 0;
    with recursive page as (
        (select h.policy_id, 1 as n from flowfabric.quota_head h
         where h.policy_id > coalesce(p_after, flowfabric.zero_uuid()) order by h.policy_id limit 1)
        union all
        select x.policy_id, p.n + 1 from page p cross join lateral (
            select h.policy_id from flowfabric.quota_head h where h.policy_id > p.policy_id order by h.policy_id limit 1) x
        where p.n < p_limit
    )
    select array_agg(p.policy_id order by p.policy_id) into v_policies from page p;
    foreach v_policy in array coalesce(v_policies, '{}') loop
        delete from flowfabric.quota_entry e where e.ctid = any (array(
            select x.ctid from flowfabric.quota_head h
            cross join lateral (select flowfabric.entries_kept_for(h.policy_id, h.key, v_now) as span offset 0) k
            cross join lateral (select y.ctid from flowfabric.quota_entry y
                                where y.policy_id = h.policy_id and y.key = h.key and y.admitted_at <= v_now - k.span
                                order by y.admitted_at limit 10000) x
            where h.policy_id = v_policy));
        get diagnostics v_n = row_count;
        entries := entries + v_n;
        with dead as (
            delete from flowfabric.quota_slot s where s.policy_id = v_policy and not flowfabric.is_live(s, v_now)
            returning s.key
        ), leaked as (
            delete from flowfabric.quota_slot s
            where s.policy_id = v_policy and s.until is null and not exists (
                select from flowfabric.execution e where e.partition = s.partition and e.id = s.id and e.state = 'active')
            returning s.key
        ), freed as (
            select d.key from dead d union all select l.key from leaked l
        ), looked as (
            insert into flowfabric.limit_due (due_at, limit_id, key)
            select distinct v_now, v_policy, f.key from freed f
            where exists (select from flowfabric.blocked b where b.limit_id = v_policy and b.limit_key = f.key)
        )
        select count(*) into v_n from freed;
        slots := slots + v_n;
        delete from flowfabric.quota_head h where h.ctid = any (array(
            select x.ctid from flowfabric.quota_head x
            where x.policy_id = v_policy and (x.asked_until is null or x.asked_until <= v_now)
              and not exists (select from flowfabric.quota_slot s where s.policy_id = x.policy_id and s.key = x.key)
              and not exists (select from flowfabric.quota_entry e where e.policy_id = x.policy_id and e.key = x.key)
              and not exists (select from flowfabric.blocked b where b.limit_id = x.policy_id and b.limit_key = x.key)
            limit 1000 for update skip locked));
        get diagnostics v_n = row_count;
        heads := heads + v_n;
        last_policy := v_policy;
    end loop;
    if slots > 0 then
        perform flowfabric.wake_duties(v_now);
    end if;
    if coalesce(cardinality(v_policies), 0) < p_limit then
        last_policy := null;
    end if;
    return next;
end;
$$;
