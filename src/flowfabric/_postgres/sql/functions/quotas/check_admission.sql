-- check_admission: admit an execution under limits that the caller gives, without claiming it
--
-- Called by services that use a policy for something else than claims. The policy need not exist, and is not created. The slot
-- ends with the window unless an active execution holds it, or when it is released. Entries are kept for the longest window
-- asked for, and for that of the policy: a caller sees all of its window, whatever others ask for. A window that no caller
-- asks for any more is forgotten after three to four of its lengths.
-- Locks    the head of the policy and key: admissions of one are serial.
-- Returns  admitted, already_admitted, rate_exceeded with the milliseconds after which to try again, concurrency_exceeded.
-- Roles    work, operate
create or replace function flowfabric.check_admission(
    p_policy uuid, p_key text, p_partition integer, p_id uuid, p_window_seconds bigint, p_rate bigint, p_cap bigint,
    p_jitter_ms bigint)
returns table (code text, retry_after_ms bigint)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_span interval := flowfabric.window_of(p_window_seconds);
    v_key text := coalesce(nullif(p_key, ''), 'default');
    v_count bigint;
    v_oldest timestamptz;
begin
    perform flowfabric.require_read_committed();
    perform flowfabric.check_quota(null, v_key, p_window_seconds, p_rate, p_cap, p_jitter_ms);
    perform flowfabric.lock_heads(array[p_policy], array[v_key], 'wait');
    v_now := flowfabric.now();
    if exists (select from flowfabric.quota_slot s
               where s.id = p_id and s.partition = p_partition and s.policy_id = p_policy and flowfabric.is_live(s, v_now)) then
        code := 'already_admitted';
        return next;
        return;
    end if;
    -- Written once per window. Shorter ones end before it and are dropped.
    update flowfabric.quota_head h
    set asked = v_span || array(select a.span from unnest(h.asked, h.asked_until) as a (span, until)
                                where a.span > v_span and a.until > v_now order by a.until),
        asked_until = v_now + 4 * v_span || array(select a.until from unnest(h.asked, h.asked_until) as a (span, until)
                                                  where a.span > v_span and a.until > v_now order by a.until)
    where h.policy_id = p_policy and h.key = v_key
      and not exists (select from unnest(h.asked, h.asked_until) as a (span, until)
                      where a.span >= v_span and a.until >= v_now + 3 * v_span);
    delete from flowfabric.quota_entry e
    where e.policy_id = p_policy and e.key = v_key and e.admitted_at <= v_now - flowfabric.entries_kept_for(p_policy, v_key, v_now);
    if p_rate > 0 and not exists (select from flowfabric.quota_entry e
                                  where e.id = p_id and e.partition = p_partition and e.policy_id = p_policy and e.key = v_key
                                    and e.admitted_at > v_now - v_span) then
        select count(*), min(e.admitted_at) into v_count, v_oldest from flowfabric.quota_entry e
        where e.policy_id = p_policy and e.key = v_key and e.admitted_at > v_now - v_span;
        if v_count >= p_rate then
            code := 'rate_exceeded';
            retry_after_ms := greatest(0, ceil(extract(epoch from v_oldest + v_span - v_now) * 1000))
                              + floor(random() * (p_jitter_ms + 1));
            return next;
            return;
        end if;
    end if;
    if p_cap > 0 then
        select count(*) into v_count from flowfabric.quota_slot s
        where s.policy_id = p_policy and s.key = v_key and flowfabric.is_live(s, v_now);
        if v_count >= p_cap then
            code := 'concurrency_exceeded';
            return next;
            return;
        end if;
    end if;
    insert into flowfabric.quota_entry (policy_id, key, id, partition, admitted_at)
    values (p_policy, v_key, p_id, p_partition, v_now)
    on conflict (id, partition, policy_id, key) do update set admitted_at = excluded.admitted_at;
    insert into flowfabric.quota_slot as s (id, partition, policy_id, key, admitted_at, until, origin)
    values (p_id, p_partition, p_policy, v_key, v_now, v_now + v_span, 'direct')
    on conflict (id, partition, policy_id) do update
    set key = excluded.key, admitted_at = excluded.admitted_at, until = excluded.until, origin = excluded.origin,
        number = default;   -- one that ended may be of another key, whose floor is another
    code := 'admitted';
    return next;
end;
$$;

-- entries_kept_for: how long the window entries of a policy and key are kept.
create or replace function flowfabric.entries_kept_for(p_policy uuid, p_key text, p_now timestamptz) returns interval
language sql stable as $$
    select greatest((select flowfabric.window_of(p.window_seconds) from flowfabric.quota_policy p where p.id = p_policy),
                    (select max(a.span) from flowfabric.quota_head h
                     cross join lateral unnest(h.asked, h.asked_until) as a (span, until)
                     where h.policy_id = p_policy and h.key = p_key and a.until > p_now), interval '0')
$$;
