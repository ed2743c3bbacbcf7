-- reconcile_quotas: remove aged window entries and dead slots, one page of the keys of policies
--
-- The duty `quota_reconciler`. Repairs what crashed callers of check_admission left behind, and slots of grants that expired.
-- Reads executions without locks. Entries are kept as long as check_admission says. Of the slots of a key the oldest thousand
-- are read: those before a dead one end with their runs.
-- Takes    p_after, p_after_key: the last policy and key of the page before; null: from the first on.
-- Returns  how many entries and slots were removed, how many heads without any, and the last policy and key; null: it was the
--          last page.
-- Roles    work, operate
create or replace function flowfabric.reconcile_quotas(p_after uuid, p_after_key text, p_limit integer)
returns table (entries integer, slots integer, heads integer, last_policy uuid, last_key text)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz := flowfabric.now();
    v_policies uuid[]; v_keys text[];
    v_n integer;
    v record;
begin
    perform flowfabric.require_read_committed();
    entries := 0; slots := 0; heads := 0;
    select array_agg(q.policy_id), array_agg(q.key) into v_policies, v_keys
    from (select h.policy_id, h.key from flowfabric.quota_head h
          where (h.policy_id, h.key) > (coalesce(p_after, flowfabric.zero_uuid()), coalesce(p_after_key, ''))
          order by h.policy_id, h.key limit p_limit) q;
    for v in
        select u.policy_id, u.key, flowfabric.entries_kept_for(u.policy_id, u.key, v_now) as span
        from unnest(v_policies, v_keys) as u (policy_id, key)
    loop
        delete from flowfabric.quota_entry e where e.ctid = any (array(
            select y.ctid from flowfabric.quota_entry y
            where y.policy_id = v.policy_id and y.key = v.key and y.admitted_at <= v_now - v.span
            order by y.admitted_at limit 10000));
        get diagnostics v_n = row_count;
        entries := entries + v_n;
        with oldest as (
            select x.ctid as tid, x::flowfabric.quota_slot as slot from flowfabric.quota_slot x
            where x.policy_id = v.policy_id and x.key = v.key order by x.number limit 1000
        ), freed as (
            delete from flowfabric.quota_slot s where s.ctid = any (array(
                select o.tid from oldest o
                where not flowfabric.is_live(o.slot, v_now)
                   or ((o.slot).until is null and not exists (
                       select from flowfabric.execution e
                       where e.partition = (o.slot).partition and e.id = (o.slot).id and e.state = 'active' offset 0))))
            returning s.key
        ), looked as (
            insert into flowfabric.limit_due (due_at, limit_id, key)
            select v_now, v.policy_id, v.key
            where exists (select from freed)
              and exists (select from flowfabric.blocked b where b.limit_id = v.policy_id and b.limit_key = v.key)
        )
        select count(*) into v_n from freed;
        slots := slots + v_n;
        delete from flowfabric.quota_head h where h.ctid = any (array(
            select x.ctid from flowfabric.quota_head x
            where x.policy_id = v.policy_id and x.key = v.key and (x.asked_until is null or x.asked_until <= v_now)
              and not exists (select from flowfabric.quota_slot s where s.policy_id = x.policy_id and s.key = x.key)
              and not exists (select from flowfabric.quota_entry e where e.policy_id = x.policy_id and e.key = x.key)
              and not exists (select from flowfabric.blocked b where b.limit_id = x.policy_id and b.limit_key = x.key)
            for update skip locked));
        get diagnostics v_n = row_count;
        heads := heads + v_n;
    end loop;
    if slots > 0 then
        perform flowfabric.wake_duties(v_now);
    end if;
    if cardinality(v_policies) >= p_limit then
        last_policy := v_policies[p_limit]; last_key := v_keys[p_limit];
    end if;
    return next;
end;
$$;
