-- Rates and caps as admissions see them. The head of a policy and key is locked while its room is read and used.

-- quota_rooms: how much room limiting policies have, under their locks.
--
-- Slots are counted from the floor of the head on: below it there are none, only what an old snapshot keeps of them. Now
-- and then the floor follows.
create or replace function flowfabric.quota_rooms(p_policies uuid[], p_keys text[], p_now timestamptz)
returns setof flowfabric.quota_room
language plpgsql as $$
declare
    v_room flowfabric.quota_room;
begin
    for v_room in
        select p.id, u.key, p.max_requests, p.max_concurrent, flowfabric.window_of(p.window_seconds), p.jitter_ms,
               case when p.max_requests > 0 then p.max_requests - n.n end,
               case when p.max_concurrent > 0 then p.max_concurrent - s.n end,
               case when p.max_requests > 0 and n.n >= p.max_requests then (
                   select e.admitted_at + flowfabric.window_of(p.window_seconds) from flowfabric.quota_entry e
                   where e.policy_id = p.id and e.key = u.key and e.admitted_at > p_now - flowfabric.window_of(p.window_seconds)
                   order by e.admitted_at offset n.n - p.max_requests limit 1) end,
               h.floor, s.low
        from unnest(p_policies, p_keys) with ordinality as u (policy_id, key, ord)
        join flowfabric.quota_policy p on p.id = u.policy_id
        left join flowfabric.quota_head h on h.policy_id = u.policy_id and h.key = u.key
        cross join lateral (
            select count(*) filter (where flowfabric.is_live(x, p_now)) as n, min(x.number) as low from flowfabric.quota_slot x
            where p.max_concurrent > 0 and x.policy_id = u.policy_id and x.key = u.key and x.number >= coalesce(h.floor, 0)) s
        cross join lateral (
            select count(*) as n from flowfabric.quota_entry e
            where p.max_requests > 0 and e.policy_id = u.policy_id and e.key = u.key
              and e.admitted_at > p_now - flowfabric.window_of(p.window_seconds)) n
        where flowfabric.is_limiting(p)
        order by u.ord
    loop
        if v_room.cap > 0 and v_room.floor is not null and random() < 0.02 then
            -- Numbers are given out under the lock of the head.
            update flowfabric.quota_head h set floor = v_room.low
            where h.policy_id = v_room.policy_id and h.key = v_room.key and h.floor < v_room.low;
        end if;
        return next v_room;
    end loop;
end;
$$;

-- is_limiting: whether a policy has a rate or a cap. Raises if its numbers make no sense: nothing is admitted then.
create or replace function flowfabric.is_limiting(p flowfabric.quota_policy) returns boolean
language sql immutable as $$
    select case when least(p.window_seconds, p.max_requests, p.max_concurrent, p.jitter_ms) < 0
                then flowfabric.corrupt('quota policy ' || p.id || ' has a negative number')
                else p.max_requests > 0 or p.max_concurrent > 0 end
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
