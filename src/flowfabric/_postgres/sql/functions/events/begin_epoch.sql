-- begin_epoch: begin another epoch of the event log if another server than before writes it
--
-- Called by migrations, by every new connection of an engine, before the first event of every session (open_log), and
-- again and again by the process that leads the duties: a restore or failover ends all sessions, so that the end of the
-- old log is noted before the first new event. Restores on the same server, from a dump or a copy of the database, are
-- recognised by the new table and the new database.
-- Locks    the current epoch, if the server is another or was not known.
-- Roles    read, submit, work, operate
create or replace function flowfabric.begin_epoch() returns void
language plpgsql security definer as $$
declare
    v_log constant oid := 'flowfabric.event'::regclass;
    v_database constant oid := (select d.oid from pg_database d where d.datname = current_database());
    v_system bigint;
    v_timeline integer;
    v_current flowfabric.log_epoch;
begin
    if pg_is_in_recovery() then
        return;
    end if;
    perform set_config('flowfabric.epoch', 'known', false);
    select i.system, i.timeline into v_system, v_timeline from flowfabric.server_identity() i;
    select l.* into v_current from flowfabric.log_epoch l where l.last_position is null;
    -- A part that cannot be read is taken to be the same.
    v_system := coalesce(v_system, v_current.system);
    v_timeline := coalesce(v_timeline, v_current.timeline);
    if (v_system, v_timeline, v_log, v_database)
       is not distinct from (v_current.system, v_current.timeline, v_current.log, v_current.database) then
        return;
    end if;
    select l.* into v_current from flowfabric.log_epoch l where l.last_position is null for update;
    if not found then
        return;   -- another connection has just begun it
    elsif v_system <> v_current.system or v_timeline <> v_current.timeline or v_log <> v_current.log
          or v_database <> v_current.database then
        update flowfabric.log_epoch l set last_position = flowfabric.last_position() where l.epoch = v_current.epoch;
        -- The time, not a count: a server restored from before a failover must not begin the same epoch again.
        insert into flowfabric.log_epoch (epoch, system, timeline, log, database)
        values (greatest(floor(extract(epoch from flowfabric.now()))::bigint, v_current.epoch + 1),
                v_system, v_timeline, v_log, v_database);
    else
        update flowfabric.log_epoch l set system = v_system, timeline = v_timeline, log = v_log, database = v_database
        where l.epoch = v_current.epoch;
    end if;
end;
$$;

-- server_identity: which server this is, as far as it may be read
--
-- The timeline of the next write: that of the last checkpoint (pg_control_checkpoint) is old for a while after a failover.
create or replace function flowfabric.server_identity(out system bigint, out timeline integer)
language plpgsql volatile as $$
begin
    begin
        select c.system_identifier into system from pg_control_system() c;
    exception when others then
        null;   -- some providers take the right away
    end;
    begin
        timeline := ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::integer;
    exception when others then
        null;
    end;
end;
$$;

-- last_position: the number of the last event, even of one that was removed because of its age
--
-- Not the last number drawn: a server that takes over begins up to 32 numbers after it, and the old one may have used them.
create or replace function flowfabric.last_position() returns bigint
language sql volatile as $$
    select greatest((select max(e.seq) from flowfabric.event e), d.event_floor) from flowfabric.deployment d
$$;
