-- take_admitted: take the first ready rows of routes whose limits let them run, and move aside those that a limit denies
--
-- Called by every claim over routes of which at least one is limited; nothing else admits executions. In rounds: read the
-- best rows without locks, look at their limits, take those that pass. Budgets are read without locks. Admissions of one
-- policy and key are serial: the call locks their heads, all of a round in one order, before it locks any execution. Only
-- the first round of a transaction waits for them; what later rounds find locked stays ready for the next claim.
-- Once a limit denied a row, the call looks ahead over up to 1,000 rows and moves aside, in one statement, all that a limit
-- known to be closed denies. A lost lease has its slot and passes.
-- Rows under a damaged budget stay ready and are passed over: no other work waits for its repair.
-- A call that has moved enough aside ends, even with nothing taken: then it wakes its caller, which asks again at once. A
-- caller that announced no sleep, or hears no notifications, reads the rest of the backlog with its next polls.
-- Takes    the routes with their floors, as claim read them; p_namespace: null: all. p_ttl: of grants: how long they are valid
--          from when the call has its locks, and their slots with them; the ready rows are hidden until then.
--          p_asleep: the process that calls, if it announced that it sleeps. p_raises: raise if nothing is left to take or to
--          move aside but work under a damaged budget; false: leave the message in flowfabric.damage.
-- Locks    heads of quota policies, then executions, skipping locked ones.
-- Returns  the rows taken, as take_ready does; their slots and window entries are recorded.
create or replace function flowfabric.take_admitted(
    p_routes integer[], p_ranks integer[], p_created timestamptz[], p_floors uuid[], p_namespace text, p_limit integer,
    p_reclaim boolean, p_ttl interval, p_asleep uuid, p_raises boolean, p_now timestamptz)
returns flowfabric.taken
language plpgsql as $$
declare
    v_most constant integer := 32;   -- rounds
    v_now timestamptz := p_now;
    v_begun timestamptz := clock_timestamp();
    v_taken flowfabric.taken := row('{}', '{}', '{}', false)::flowfabric.taken;
    v_part flowfabric.taken;
    -- After the last row seen.
    v_rank integer := -1; v_at timestamptz := '-infinity'; v_id uuid := flowfabric.zero_uuid();
    v_last_rank integer; v_last_at timestamptz; v_last_id uuid;
    -- The rows of a round.
    v_tids tid[]; v_partitions integer[]; v_ids uuid[]; v_limits bigint[]; v_lost boolean[];
    v_take tid[];
    v_until timestamptz;
    v_known bigint[] := '{}'; v_unknown bigint[];   -- limit sets whose limits were looked at
    v_slotted text[]; v_entered text[];
    -- Budgets: those that were read, and those that are exhausted.
    v_read uuid[] := '{}'; v_new uuid[]; v_shut uuid[] := '{}'; v_shut_details text[] := '{}';
    v_shut_dimensions text[] := '{}';
    v_damaged uuid[] := '{}';   -- and those that are damaged
    -- Policies with their keys, by name.
    v_new_policies uuid[]; v_new_keys text[]; v_got boolean[];
    v_names text[] := '{}'; v_busy text[] := '{}';
    v_rooms flowfabric.quota_room[] := '{}'; v_found flowfabric.quota_room[];
    v_room flowfabric.quota_room;
    v_denied boolean; v_passes boolean; v_skips boolean;
    v_no integer; v_name text;
    v_places integer[];
    v_waits boolean := current_setting('flowfabric.holds_limits', true) is distinct from 'on';
    v_first boolean := v_waits;   -- this transaction holds no budget yet
    v_held uuid[]; v_held_details text[]; v_held_dimensions text[];
    v_opened boolean;
    v_moved integer := 0;
    v_shares boolean; v_shared boolean := false;
    v_size integer;
    v_far bigint := current_setting('max_connections')::bigint;
    v record;
begin
    for v_round in 1 .. v_most loop
        -- For the last one some more are read: concurrent claims may have locked the first.
        v_size := case when p_limit - cardinality(v_taken.ids) = 1 then 16 else p_limit - cardinality(v_taken.ids) end;
        if cardinality(v_damaged) > 0 then
            select s.rank, s.created_at, s.id into v_rank, v_at, v_id
            from flowfabric.skip_damaged(p_routes, p_ranks, p_created, p_floors, p_namespace, v_rank, v_at, v_id, v_damaged,
                                         p_reclaim, v_now) s;
        end if;
        select array_agg(b.tid), array_agg(b.partition), array_agg(b.id), array_agg(b.limits), array_agg(b.lost),
               (array_agg(b.rank))[count(*)], (array_agg(b.created_at))[count(*)], (array_agg(b.id))[count(*)]
        into v_tids, v_partitions, v_ids, v_limits, v_lost, v_last_rank, v_last_at, v_last_id
        from (select c.*, c.available_at is not null as lost
              from flowfabric.best_ready(p_routes, p_ranks, p_created, p_floors, p_namespace, v_rank, v_at, v_id,
                                         v_size, p_reclaim, v_now) c
              order by c.rank, c.created_at, c.id limit v_size) b;
        exit when v_tids is null;

        -- Limits that were not looked at before.
        select array_agg(distinct u.limits) into v_unknown
        from unnest(v_limits) as u (limits) where u.limits is not null and u.limits <> all (v_known);
        v_new := null; v_new_policies := null;
        if v_unknown is not null then
            v_known := v_known || v_unknown;
            select array_agg(distinct b.id) filter (where b.id <> all (v_read)) into v_new
            from unnest(v_unknown) as s (limits)
            cross join lateral (select x.budget_ids from flowfabric.limit_set x where x.digest = s.limits limit 1) l
            cross join lateral unnest(l.budget_ids) as b (id);
            select array_agg(n.id), array_agg(n.key) into v_new_policies, v_new_keys
            from (select distinct p.id, k.key
                  from unnest(v_unknown) as s (limits)
                  cross join lateral (select x.quota_ids, x.quota_keys from flowfabric.limit_set x
                                      where x.digest = s.limits limit 1) l
                  cross join lateral unnest(l.quota_ids, l.quota_keys) as k (id, key)
                  join flowfabric.quota_policy p on p.id = k.id
                  where (p.max_requests <> 0 or p.max_concurrent <> 0)
                    and flowfabric.head_name(k.id, k.key) <> all (v_names)
                  order by 1, 2) n;
        end if;
        if v_new is not null then
            v_read := v_read || v_new;
            select v_shut || coalesce(array_agg(x.budget_id order by x.budget_id) filter (where not x.damaged), '{}'),
                   v_shut_details || coalesce(array_agg(flowfabric.budget_denial(x.budget_id, x.dimension, x.used, x.hard)
                                                        order by x.budget_id) filter (where not x.damaged), '{}'),
                   v_shut_dimensions || coalesce(array_agg(x.dimension order by x.budget_id) filter (where not x.damaged), '{}'),
                   v_damaged || coalesce(array_agg(x.budget_id) filter (where x.damaged), '{}')
            into v_shut, v_shut_details, v_shut_dimensions, v_damaged
            from flowfabric.exhausted_budgets(v_new) x;
        end if;
        if v_new_policies is not null then
            -- One execution of policies that are far from their cap: claims do not wait for each other. Each transaction that
            -- shares the lock takes one slot, and there are not more of them than connections.
            v_shares := v_waits and p_limit = 1 and not exists (
                select from unnest(v_new_policies) as u (id) join flowfabric.quota_policy p on p.id = u.id
                where p.max_requests <> 0 or p.max_concurrent < v_far) and not exists (
                select from flowfabric.quota_rooms(v_new_policies, v_new_keys, v_far, false, v_now) r where r.slots_left < v_far);
            v_found := case when v_shares then flowfabric.share_heads(v_new_policies, v_new_keys, v_far) end;
            v_shared := v_shared or v_found is not null;
            if v_found is null then
                v_got := flowfabric.lock_heads(v_new_policies, v_new_keys, case when v_waits then 'wait' else 'skip' end);
                select v_busy || coalesce(array_agg(flowfabric.head_name(u.policy, u.key)) filter (where not u.got), '{}'),
                       array_agg(u.policy) filter (where u.got), array_agg(u.key) filter (where u.got)
                into v_busy, v_new_policies, v_new_keys
                from unnest(v_new_policies, v_new_keys, v_got) as u (policy, key, got);
                v_names := v_names || v_busy;
                v_rooms := array_cat(v_rooms, array_fill(null::flowfabric.quota_room, array[cardinality(v_names) - cardinality(v_rooms)]));
                v_found := array(select r from flowfabric.quota_rooms(v_new_policies, v_new_keys, p_limit, true, flowfabric.now()) as r);
            end if;
            v_now := flowfabric.now();
            foreach v_room in array v_found loop
                v_names := v_names || flowfabric.head_name(v_room.policy_id, v_room.key);
                v_rooms := v_rooms || v_room;
            end loop;
            if v_waits then
                v_waits := false;
                perform set_config('flowfabric.holds_limits', 'on', true);
                continue;   -- another claim took it while this one waited
            end if;
        end if;

        -- Which rows pass, best first.
        v_denied := false;
        if cardinality(v_names) = 0 and cardinality(v_shut) = 0 and cardinality(v_damaged) = 0 then
            v_take := v_tids;
        else
            v_take := '{}'; v_slotted := null; v_entered := null;
            if cardinality(v_names) > 0 then
                select array_agg(s.policy_id || ' ' || s.id) into v_slotted
                from unnest(v_partitions, v_ids) as u (partition, id)
                cross join lateral (select x.* from flowfabric.quota_slot x where x.id = u.id and x.partition = u.partition
                                    offset 0) s
                where flowfabric.is_live(s, v_now);
                if exists (select from unnest(v_rooms) as r where r.rate > 0) then
                    select array_agg(r.policy_id || ' ' || e.id) into v_entered
                    from unnest(v_partitions, v_ids) as u (partition, id)
                    cross join lateral (select x.* from flowfabric.quota_entry x where x.id = u.id and x.partition = u.partition
                                        offset 0) e
                    join unnest(v_rooms) as r on r.policy_id = e.policy_id and r.key = e.key and r.rate > 0
                    where e.admitted_at > v_now - r.span;
                end if;
            end if;
            for v in
                select u.tid, u.id, u.lost, u.limits, l.digest, l.budget_ids, l.quota_ids, l.quota_keys
                from unnest(v_tids, v_ids, v_limits, v_lost) with ordinality as u (tid, id, limits, lost, ord)
                left join lateral (select x.* from flowfabric.limit_set x where x.digest = u.limits limit 1) l on true
                order by u.ord
            loop
                if v.lost or v.limits is null then
                    v_take := v_take || v.tid;
                    continue;
                elsif v.digest is null then
                    perform flowfabric.corrupt('execution ' || v.id || ' has an unknown limit set');
                elsif v.budget_ids && v_damaged then
                    continue;
                elsif v.budget_ids && v_shut then
                    v_denied := true;
                    continue;
                end if;
                v_passes := true; v_skips := false; v_places := '{}';
                for i in 1 .. cardinality(v.quota_ids) loop
                    v_name := flowfabric.head_name(v.quota_ids[i], v.quota_keys[i]);
                    v_no := array_position(v_names, v_name);
                    continue when v_no is null;
                    v_room := v_rooms[v_no];
                    if v_name = any (v_busy) then
                        v_skips := true;
                    elsif v.quota_ids[i] || ' ' || v.id = any (v_slotted) then
                        continue;   -- admitted already
                    elsif (v_room.rate > 0 and v_room.rate_left <= 0
                           and (v.quota_ids[i] || ' ' || v.id = any (v_entered)) is not true)
                          or (v_room.cap > 0 and v_room.slots_left <= 0) then
                        v_passes := false;
                    else
                        v_places := v_places || v_no;
                    end if;
                end loop;
                v_denied := v_denied or not v_passes;
                continue when v_skips or not v_passes;
                v_take := v_take || v.tid;
                continue when p_limit - cardinality(v_taken.ids) = 1;   -- one of them is taken
                foreach v_no in array v_places loop
                    v_rooms[v_no].slots_left := v_rooms[v_no].slots_left - 1;
                    if ((v_rooms[v_no].policy_id || ' ' || v.id) = any (v_entered)) is not true then
                        v_rooms[v_no].rate_left := v_rooms[v_no].rate_left - 1;
                    end if;
                end loop;
            end loop;
        end if;

        if cardinality(v_take) > 0 then
            v_until := date_trunc('milliseconds', v_now + p_ttl);
            v_part := flowfabric.take_ready(
                v_take, null, null, null, null, p_limit - cardinality(v_taken.ids), p_reclaim, v_until, v_now);
            if cardinality(v_names) > 0 and cardinality(v_part.ids) > 0 then
                perform flowfabric.record_slots(v_part.partitions, v_part.ids, v_slotted, v_until, v_now);
            end if;
            if cardinality(v_part.ids) < least(cardinality(v_take), p_limit - cardinality(v_taken.ids))
               and cardinality(v_names) > 0 then
                -- Some were gone: their room is left.
                for v_room in
                    select r.* from unnest(v_rooms) as h
                    cross join lateral flowfabric.quota_rooms(array[h.policy_id], array[h.key], case when v_shared then v_far else p_limit end, not v_shared, v_now) as r
                    where h.policy_id is not null
                loop
                    v_rooms[array_position(v_names, flowfabric.head_name(v_room.policy_id, v_room.key))] := v_room;
                end loop;
            end if;
            v_taken.partitions := v_taken.partitions || v_part.partitions;
            v_taken.ids := v_taken.ids || v_part.ids;
            v_taken.tids := v_taken.tids || v_part.tids;
            v_taken.again := v_taken.again or v_part.again;
        end if;
        if v_denied then
            v_opened := false;
            if cardinality(v_shut) > 0 then
                v_size := cardinality(v_shut);
                -- Look again, under a lock that keeps them from being opened meanwhile. A call that took executions does not
                -- wait. Rows of those that are locked by others are denied and stay ready.
                v_new := flowfabric.hold_budgets(v_shut, v_first and cardinality(v_taken.ids) = 0);
                v_now := flowfabric.now();
                v_first := false;
                perform set_config('flowfabric.holds_limits', 'on', true);
                select coalesce(array_agg(x.budget_id order by x.budget_id) filter (where not x.damaged), '{}'),
                       coalesce(array_agg(flowfabric.budget_denial(x.budget_id, x.dimension, x.used, x.hard)
                                          order by x.budget_id) filter (where not x.damaged), '{}'),
                       coalesce(array_agg(x.dimension order by x.budget_id) filter (where not x.damaged), '{}'),
                       v_damaged || coalesce(array_agg(x.budget_id) filter (where x.damaged), '{}')
                into v_shut, v_shut_details, v_shut_dimensions, v_damaged
                from flowfabric.exhausted_budgets(v_shut) x;
                v_opened := cardinality(v_shut) < v_size;
            end if;
            select coalesce(array_agg(u.id order by u.id), '{}'), coalesce(array_agg(u.detail order by u.id), '{}'),
                   coalesce(array_agg(u.dimension order by u.id), '{}')
            into v_held, v_held_details, v_held_dimensions
            from unnest(v_shut, v_shut_details, v_shut_dimensions) as u (id, detail, dimension) where u.id = any (v_new);
            v_moved := v_moved + flowfabric.move_aside(
                p_routes, p_ranks, p_created, p_floors, p_namespace, v_rank, v_at, v_id, v_held, v_held_details,
                v_held_dimensions, v_names, v_rooms, v_now);
        end if;
        exit when cardinality(v_taken.ids) >= p_limit;
        continue when v_denied and v_opened;   -- look at its rows again
        -- A long backlog that is denied takes several claims.
        exit when v_moved >= 1000 and cardinality(v_taken.ids) > 0
               or v_moved >= 100 and clock_timestamp() > v_begun + interval '200 milliseconds';
        v_rank := v_last_rank; v_at := v_last_at; v_id := v_last_id;
    end loop;
    if v_moved > 0 and v_tids is not null and cardinality(v_taken.ids) = 0 then
        perform flowfabric.wake_process(p_asleep);
    end if;
    if cardinality(v_damaged) > 0 and v_moved = 0 and cardinality(v_taken.ids) = 0 then
        if p_raises then
            perform flowfabric.corrupt(flowfabric.budget_damage(v_damaged[1]));
        end if;
        perform set_config('flowfabric.damage', flowfabric.budget_damage(v_damaged[1]), true);
    end if;
    return v_taken;
end;
$$;

-- skip_damaged: where a claim continues, in order not to read rows under damaged budgets one by one: a thousand of them at most.
create or replace function flowfabric.skip_damaged(
    p_routes integer[], p_ranks integer[], p_created timestamptz[], p_floors uuid[], p_namespace text, p_rank integer,
    p_at timestamptz, p_id uuid, p_damaged uuid[], p_reclaim boolean, p_now timestamptz)
returns table (rank integer, created_at timestamptz, id uuid)
language sql as $$
    select p.rank, p.created_at, p.id
    from (select c.rank, c.created_at, c.id,
                 bool_and(c.available_at is null and coalesce(l.budget_ids && p_damaged, false))
                     over (order by c.rank, c.created_at, c.id) as passed
          from flowfabric.best_ready(p_routes, p_ranks, p_created, p_floors, p_namespace, p_rank, p_at, p_id, 1000, p_reclaim,
                                     p_now) c
          left join lateral (select x.budget_ids from flowfabric.limit_set x where x.digest = c.limits limit 1) l on true
          order by c.rank, c.created_at, c.id limit 1000) p
    where p.passed
    union all
    select p_rank, p_at, p_id
    order by 1 desc, 2 desc, 3 desc limit 1
$$;

-- budget_denial: why a budget holds an execution, for people.
create or replace function flowfabric.budget_denial(p_id uuid, p_dimension text, p_used bigint, p_hard bigint) returns text
language sql immutable as $$ select 'budget ' || p_id || ': ' || p_dimension || ' ' || p_used || '/' || p_hard $$;

-- budget_damage: what to say of a damaged budget.
create or replace function flowfabric.budget_damage(p_id uuid) returns text
language sql immutable as $$ select 'budget ' || p_id || ' has no running numbers, or damaged ones; reset_budget repairs it' $$;
