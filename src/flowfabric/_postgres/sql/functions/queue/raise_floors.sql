-- raise_floors: move the floors of routes up to their first ready row, or remove them if there is none.
--
-- Called by claims now and then. Rows that are not committed yet are known by their announcements. Does nothing for a
-- route whose floor another call is raising.
create or replace function flowfabric.raise_floors(p_lane text, p_routes integer[]) returns void
language plpgsql as $$
declare
    v_now timestamptz;
    v_routes integer[];
    v_bounded integer[]; v_bound_rank integer[]; v_bound_time timestamptz[];
    v_low flowfabric.ready_floor; v_new flowfabric.ready_floor; v_bound flowfabric.ready_floor;
    v_first flowfabric.ready;
    v_seen tid[];
    v_at integer;
begin
    -- A snapshot older than the read of the announcements would not show what was committed before it.
    if current_setting('transaction_isolation') <> 'read committed' then
        return;
    end if;
    select array_agg(u.route) into v_routes from unnest(p_routes) as u (route)
    where pg_try_advisory_xact_lock(flowfabric.ready_lock(u.route), -1);
    if v_routes is null then
        return;
    end if;
    v_now := flowfabric.now();
    select array_agg(b.route), array_agg(b.rank), array_agg(b.at) into v_bounded, v_bound_rank, v_bound_time
    from (select distinct on (a.route) a.route, a.rank, a.at
          from (select l.classid::bigint - flowfabric.ready_lock(0) as route,
                       flowfabric.place_rank(l.objid::bigint) as rank, flowfabric.place_time(l.objid::bigint, v_now) as at
                from pg_locks l
                where l.locktype = 'advisory' and l.objsubid = 2 and l.objid::bigint < 2147483648
                  and l.classid::bigint - flowfabric.ready_lock(0) = any (v_routes)
                  and l.database = (select d.oid from pg_database d where d.datname = current_database())
                  and flowfabric.may_announce(l.pid)) a
          order by a.route, a.rank, a.at) b;
    foreach v_at in array v_routes loop
        -- Only these are removed: a floor row that is committed after the ready rows were read belongs to one not seen.
        select array_agg(f.ctid) into v_seen from flowfabric.ready_floor f where f.lane = p_lane and f.route = v_at;
        select f.* into v_low from flowfabric.ready_floor f where f.ctid = any (v_seen)
        order by f.rank, f.created_at, f.id limit 1;
        continue when not found;
        select r.* into v_first from flowfabric.ready r
        where r.route = v_at and (r.rank, r.created_at, r.id) >= (v_low.rank, v_low.created_at, v_low.id)
        order by r.rank, r.created_at, r.id limit 1;
        v_new := v_low;
        if found then
            v_new.rank := v_first.rank; v_new.created_at := v_first.created_at; v_new.id := v_first.id;
        else
            v_new.rank := flowfabric.rank_of(0); v_new.created_at := v_now; v_new.id := flowfabric.zero_uuid();
        end if;
        if v_at = any (v_bounded) then
            v_bound := v_low;
            v_bound.rank := v_bound_rank[array_position(v_bounded, v_at)];
            v_bound.created_at := v_bound_time[array_position(v_bounded, v_at)];
            v_bound.id := flowfabric.zero_uuid();
            if (v_bound.rank, v_bound.created_at, v_bound.id) < (v_new.rank, v_new.created_at, v_new.id) then
                v_new := v_bound;
            end if;
        elsif v_first.route is null and v_low.created_at < v_now - interval '5 seconds' then
            -- Empty for a while: no claim visits it until the next row comes.
            delete from flowfabric.ready_floor f where f.ctid = any (v_seen);
            continue;
        end if;
        if (v_new.rank, v_new.created_at, v_new.id) > (v_low.rank, v_low.created_at, v_low.id)
           or cardinality(v_seen) > 1 then
            if (v_new.rank, v_new.created_at, v_new.id) < (v_low.rank, v_low.created_at, v_low.id) then
                v_new := v_low;
            end if;
            delete from flowfabric.ready_floor f where f.ctid = any (v_seen);
            insert into flowfabric.ready_floor select v_new.*;
        end if;
    end loop;
end;
$$;

-- may_announce: whether the holder of an advisory lock can have written. Any user who can connect can take such a
-- lock, even one who may only read.
--
-- A session may have taken a role that its login role is only a member of (set role), and its login role may have been
-- dropped since. Ignoring an announcement loses work or events; heeding a false one costs time. So only sessions of
-- roles that cannot write in any way are ignored.
create or replace function flowfabric.may_announce(p_pid integer) returns boolean
language sql stable as $$
    select p_pid is null or p_pid = pg_backend_pid() or not exists (
        select from pg_stat_get_activity(p_pid) a join pg_roles r on r.oid = a.usesysid
        where case when flowfabric.may_write(r.oid) then false
                   else not exists (select from pg_roles o
                                    where pg_has_role(r.oid, o.oid, 'member') and flowfabric.may_write(o.oid)) end)
$$;

-- may_write: whether a role may submit, work or operate.
create or replace function flowfabric.may_write(p_role oid) returns boolean
language sql stable as $$
    select has_function_privilege(
        p_role, 'flowfabric.create_one(text, text, text, integer, uuid, bytea, text, text)', 'execute')
$$;
