-- reconcile_quotas: remove aged window entries and dead slots, one page of the keys of policies
--
-- The duty `quota_reconciler`. Repairs what crashed callers of check_admission left behind, and slots of grants that expired.
-- Reads executions without locks. Entries are kept as long as check_admission says. A page ends early at a key with more
-- than 1,000 slots to look at, or 10,000 aged entries: the next one continues with it.
-- Takes    p_after, p_after_key: the last policy and key of the page before; null: from the first on. p_after_number: the
--          last slot of this key that was looked at; null: the key is done.
-- Locks    what it removes, skipping what is locked.
-- Returns  how many entries and slots were removed, how many heads without any, and the place to continue from; null: it was the
--          last page.
-- Roles    work, operate
create or replace function flowfabric.reconcile_quotas(p_after uuid, p_after_key text, p_after_number bigint, p_limit integer)
returns table (entries integer, slots integer, heads integer, last_policy uuid, last_key text, last_number bigint)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    c_entries constant integer := 10000;
    c_slots constant integer := 1000;
    v_now timestamptz := flowfabric.now();
    v_policies uuid[]; v_keys text[];
    v_from bigint; v_to bigint;   -- the slots of a key that are looked at
    v_looked integer;
    v_n integer;
    v_has_more boolean;
    v record;
begin
    perform flowfabric.require_read_committed();
    entries := 0; slots := 0; heads := 0;
    select array_agg(q.policy_id), array_agg(q.key) into v_policies, v_keys
    from (select h.policy_id, h.key from flowfabric.quota_head h
          where (h.policy_id, h.key) >= (coalesce(p_after, flowfabric.zero_uuid()), coalesce(p_after_key, ''))
            and (p_after_number is not null or (h.policy_id, h.key) is distinct from (p_after, p_after_key))
          order by h.policy_id, h.key limit p_limit) q;
    for v in
        select u.policy_id, u.key, flowfabric.entries_kept_for(u.policy_id, u.key, v_now) as span
        from unnest(v_policies, v_keys) with ordinality as u (policy_id, key, ord) order by u.ord
    loop
        delete from flowfabric.quota_entry e where e.ctid = any (array(
            select y.ctid from flowfabric.quota_entry y
            where y.policy_id = v.policy_id and y.key = v.key and y.admitted_at <= v_now - v.span
            order by y.admitted_at limit c_entries for update skip locked));
        get diagnostics v_n = row_count;
        entries := entries + v_n;
        v_has_more := v_n = c_entries;
        v_from := case when (v.policy_id, v.key) = (p_after, p_after_key) then p_after_number else 0 end;
        select max(w.number), count(*) into v_to, v_looked
        from (select x.number from flowfabric.quota_slot x
              where x.policy_id = v.policy_id and x.key = v.key and x.number > v_from order by x.number limit c_slots) w;
        -- A slot that is taken while this statement reads has a new number, above v_to.
        with freed as (
            delete from flowfabric.quota_slot s where s.ctid = any (array(
                select x.ctid from flowfabric.quota_slot x
                where x.policy_id = v.policy_id and x.key = v.key and x.number > v_from and x.number <= v_to
                  and (not flowfabric.is_live(x, v_now)
                       or (x.until is null and not exists (
                           select from flowfabric.execution e
                           where e.partition = x.partition and e.id = x.id and e.state = 'active' offset 0)))
                for update skip locked))
            returning s.key
        ), looked as (
            insert into flowfabric.limit_due (due_at, limit_id, key)
            select v_now, v.policy_id, v.key
            where exists (select from freed)
              and exists (select from flowfabric.blocked b where b.limit_id = v.policy_id and b.limit_key = v.key)
        )
        select count(*) into v_n from freed;
        slots := slots + v_n;
        if v_has_more or v_looked = c_slots then
            last_policy := v.policy_id; last_key := v.key; last_number := coalesce(v_to, v_from);
            exit;
        end if;
        delete from flowfabric.quota_head h where h.ctid = any (array(
            select x.ctid from flowfabric.quota_head x
            where x.policy_id = v.policy_id and x.key = v.key and v_now >= all (x.asked_until)
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
    if last_policy is null and cardinality(v_policies) >= p_limit then
        last_policy := v_policies[p_limit]; last_key := v_keys[p_limit];
    end if;
    return next;
end;
$$;
