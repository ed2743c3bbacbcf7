-- Rates and caps as admissions see them. The head of a policy and key is locked while its room is read and used.

-- quota_rooms: how much room limiting policies have, under their locks.
--
-- Slots are found from the floor of the head on: below it there are none, only what an old snapshot keeps of them. Now and
-- then the floor follows. Their numbers differ, so that the first and the last bound how many there are: they are counted
-- only if this bound leaves less room than the caller can use.
-- Takes    p_wanted: more room than this is not used; null: all of it. p_raises: the floors may follow: the locks exclude
--          other admissions.
create or replace function flowfabric.quota_rooms(p_policies uuid[], p_keys text[], p_wanted bigint, p_raises boolean, p_now timestamptz)
returns setof flowfabric.quota_room
language plpgsql as $$
declare
    v_room flowfabric.quota_room;
begin
    for v_room in
        select p.id, u.key, p.max_requests, p.max_concurrent, flowfabric.window_of(p.window_seconds), p.jitter_ms,
               case when p.max_requests > 0 then p.max_requests - n.n end,
               case when p.max_concurrent > 0 then p.max_concurrent - coalesce(s.high - s.low + 1, 0) end,
               case when p.max_requests > 0 and n.n >= p.max_requests then (
                   select e.admitted_at + flowfabric.window_of(p.window_seconds) from flowfabric.quota_entry e
                   where e.policy_id = p.id and e.key = u.key and e.admitted_at > p_now - flowfabric.window_of(p.window_seconds)
                   order by e.admitted_at offset n.n - p.max_requests limit 1) end,
               h.floor, s.low
        from unnest(p_policies, p_keys) with ordinality as u (policy_id, key, ord)
        join flowfabric.quota_policy p on p.id = u.policy_id
        left join lateral (select x.floor from flowfabric.quota_head x
                           where x.policy_id = u.policy_id and x.key = u.key limit 1) h on true
        cross join lateral (
            select (select x.number from flowfabric.quota_slot x
                    where p.max_concurrent > 0 and x.policy_id = u.policy_id and x.key = u.key
                      and x.number >= coalesce(h.floor, 0) order by x.number limit 1) as low,
                   (select x.number from flowfabric.quota_slot x
                    where p.max_concurrent > 0 and x.policy_id = u.policy_id and x.key = u.key
                    order by x.number desc limit 1) as high) s
        cross join lateral (
            select count(*) as n from flowfabric.quota_entry e
            where p.max_requests > 0 and e.policy_id = u.policy_id and e.key = u.key
              and e.admitted_at > p_now - flowfabric.window_of(p.window_seconds)) n
        where p.max_requests <> 0 or p.max_concurrent <> 0
        order by u.ord
    loop
        if least(v_room.rate, v_room.cap, v_room.jitter_ms) < 0 or v_room.span < interval '0' then
            perform flowfabric.corrupt('quota policy ' || v_room.policy_id || ' has a negative number');
        end if;
        if v_room.cap > 0 and v_room.low is not null and (p_wanted is null or v_room.slots_left < p_wanted) then
            -- As is_live says, which is asked only for the few whose end has passed.
            select v_room.cap - count(*) into v_room.slots_left from flowfabric.quota_slot x
            where x.policy_id = v_room.policy_id and x.key = v_room.key and x.number >= v_room.low
              and (x.until is null or x.until > p_now or (x.origin = 'direct' and flowfabric.is_live(x, p_now)));
        end if;
        if p_raises and v_room.floor < v_room.low and random() < 0.05 then
            update flowfabric.quota_head h set floor = v_room.low
            where h.policy_id = v_room.policy_id and h.key = v_room.key and h.floor < v_room.low;
        end if;
        return next v_room;
    end loop;
end;
$$;

-- window_of: the length of a policy's window.
create or replace function flowfabric.window_of(p_seconds bigint) returns interval
language sql immutable as $$ select coalesce(nullif(p_seconds, 0), 60) * interval '1 second' $$;

-- is_live: whether a slot counts: it runs with its execution, or its grant or time has not ended.
create or replace function flowfabric.is_live(s flowfabric.quota_slot, p_now timestamptz) returns boolean
language sql stable as $$
    select s.until is null or s.until > p_now or (s.origin = 'direct' and exists (
        select from flowfabric.execution e where e.partition = s.partition and e.id = s.id and e.state = 'active'))
$$;
