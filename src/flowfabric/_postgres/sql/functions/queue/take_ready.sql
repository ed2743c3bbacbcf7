-- take_ready: remove ready rows and lock their executions: the first of a route from its floor on, or given
-- ones.
--
-- Takes    p_tids: rows that were read without locks, the first p_limit of which are taken; null: those of p_route.
--          p_granted: hide the ready rows until then instead of removing them.
-- An execution that reached its reclaim cap is ended here instead of claimed, and the search continues after it.
create or replace function flowfabric.take_ready(
    p_tids tid[], p_route integer, p_rank integer, p_created timestamptz, p_id uuid, p_limit integer, p_reclaim boolean,
    p_granted timestamptz, p_now timestamptz)
returns flowfabric.taken
language plpgsql as $$
declare
    v_taken flowfabric.taken := row('{}', '{}', '{}', false)::flowfabric.taken;
    v_partitions integer[]; v_ids uuid[]; v_places tid[]; v_tids tid[]; v_gone uuid[];
    v_again boolean; v_lost boolean; v_held boolean; v_granted boolean; v_missed boolean;
    v_capped integer[];
begin
    loop
        -- Skip rows whose execution is locked, or was claimed or ended since; the scan continues after them. Every call that
        -- changes a ready row holds its execution's lock, so ready rows need none. One that was removed or changed just
        -- before the lock was granted is missed: the next round finds it where it is now, if it may still be claimed.
        if p_tids is null then
            with locked as (
                select r.ctid as tid, e.ctid as place, e.partition, e.id, e.pending <> 'first' as again,
                       e.lease_lost is not null as lost, e.blocking_reason = 'waiting_for_capable_worker' as held,
                       r.granted_until is not null as granted
                from flowfabric.ready r
                join flowfabric.execution e on e.partition = r.partition and e.id = r.id
                where r.route = p_route and (r.rank, r.created_at, r.id) >= (p_rank, p_created, p_id)
                  and (r.granted_until is null or r.granted_until <= p_now)
                  and (r.deadline_at is null or r.deadline_at > p_now)
                  and (r.available_at is null or (p_reclaim and r.available_at <= p_now))
                  and e.pending is not null
                order by r.rank, r.created_at, r.id
                limit p_limit - cardinality(v_taken.ids)
                for no key update of e skip locked
            )
            select array_agg(l.tid), array_agg(l.place), array_agg(l.partition), array_agg(l.id), bool_or(l.again),
                   bool_or(l.lost), bool_or(l.held), bool_or(l.granted)
            into v_tids, v_places, v_partitions, v_ids, v_again, v_lost, v_held, v_granted
            from locked l;
        else
            with locked as (
                select r.ctid as tid, e.ctid as place, e.partition, e.id, e.pending <> 'first' as again,
                       e.lease_lost is not null as lost, e.blocking_reason = 'waiting_for_capable_worker' as held,
                       r.granted_until is not null as granted
                from unnest(p_tids) as u (tid)
                join flowfabric.ready r on r.ctid = u.tid
                join flowfabric.execution e on e.partition = r.partition and e.id = r.id
                where (r.granted_until is null or r.granted_until <= p_now)
                  and e.pending is not null
                limit p_limit
                for no key update of e skip locked
            )
            select array_agg(l.tid), array_agg(l.place), array_agg(l.partition), array_agg(l.id), bool_or(l.again),
                   bool_or(l.lost), bool_or(l.held), bool_or(l.granted)
            into v_tids, v_places, v_partitions, v_ids, v_again, v_lost, v_held, v_granted
            from locked l;
        end if;
        exit when v_tids is null;
        -- By id too: the slot of a removed row may have a new one. `is true`, so that no index is chosen for the ids: one
        -- whose table was empty when its statistics were taken would be read whole, with what old snapshots keep in it.
        if p_granted is not null then
            with hidden as (
                update flowfabric.ready r set granted_until = p_granted
                where r.ctid = any (v_tids) and (r.id = any (v_ids)) is true returning r.id
            )
            select array_agg(h.id) into v_gone from hidden h;
            v_missed := cardinality(v_gone) is distinct from cardinality(v_ids);
        elsif cardinality(v_ids) = 1 then
            delete from flowfabric.ready r where r.ctid = v_tids[1] and r.id = v_ids[1];
            v_missed := not found;
            v_gone := null;
        else
            with gone as (
                delete from flowfabric.ready r where r.ctid = any (v_tids) and (r.id = any (v_ids)) is true returning r.id
            )
            select array_agg(g.id) into v_gone from gone g;
            v_missed := cardinality(v_gone) is distinct from cardinality(v_ids);
        end if;
        if v_missed then
            select array_agg(u.partition order by o), array_agg(u.id order by o), array_agg(u.place order by o)
            into v_partitions, v_ids, v_places
            from unnest(v_partitions, v_ids, v_places) with ordinality as u (partition, id, place, o)
            where u.id = any (v_gone);
            continue when v_ids is null and p_tids is null;
            exit when v_ids is null;
        end if;
        if v_granted then
            -- Grants that expired unused.
            delete from flowfabric.claim_grant g where g.ctid = any (array(
                select f.tid from unnest(v_partitions, v_ids) as u (partition, id)
                cross join lateral (select x.ctid as tid from flowfabric.claim_grant x
                                    where x.partition = u.partition and x.id = u.id offset 0) f));
        end if;
        if v_held then
            perform flowfabric.drop_blocked(v_partitions, v_ids);
            if p_granted is not null then   -- a grant is for an execution that is no longer blocked
                update flowfabric.execution e
                set blocking_reason = 'waiting_for_worker', blocking_detail = null, transitioned_at = p_now, mutated_at = null,
                    state = case when e.resume_pending then 'resumable' else 'waiting' end
                from unnest(v_partitions, v_ids) as u (partition, id)
                where e.partition = u.partition and e.id = u.id and e.blocking_reason = 'waiting_for_capable_worker';
                select array_agg(e.ctid order by u.o) into v_places
                from unnest(v_partitions, v_ids) with ordinality as u (partition, id, o)
                join flowfabric.execution e on e.partition = u.partition and e.id = u.id;
            end if;
        end if;
        if v_lost then
            select array_agg(o) into v_capped
            from unnest(v_partitions, v_ids) with ordinality as u (partition, id, o)
            join flowfabric.execution e on e.partition = u.partition and e.id = u.id
            where e.lease_lost is not null and e.reclaims >= flowfabric.reclaim_cap(e.policy, null);
            if v_capped is not null then
                perform flowfabric.end_capped(
                    (select array_agg(v_partitions[o]) from unnest(v_capped) o),
                    (select array_agg(v_ids[o]) from unnest(v_capped) o), flowfabric.now());
                select array_agg(u.partition order by o), array_agg(u.id order by o), array_agg(u.place order by o)
                into v_partitions, v_ids, v_places
                from unnest(v_partitions, v_ids, v_places) with ordinality as u (partition, id, place, o)
                where o <> all (v_capped);
            end if;
        else
            v_capped := null;
        end if;
        v_taken.partitions := v_taken.partitions || v_partitions;
        v_taken.ids := v_taken.ids || v_ids;
        v_taken.tids := v_taken.tids || v_places;
        v_taken.again := v_taken.again or v_again;
        exit when (v_capped is null and not v_missed) or p_tids is not null;
    end loop;
    return v_taken;
end;
$$;
