-- log_end: the number up to which the log is complete: no event can appear below it any more.
--
-- Events up to this number must be read by a later statement, with a snapshot of its own.
create or replace function flowfabric.log_end() returns bigint
language sql volatile as $$ select s.upto from flowfabric.log_state() s $$;

-- log_state: the same number, and whether a call is writing events, or drew a number, while it was found.
--
-- The order of the reads matters. A follower that announced its sleep before (sleep_for_events) and finds the log neither
-- longer nor busy may sleep: every later writer sees its announcement, because writers look for it after they announced
-- themselves (open_log).
create or replace function flowfabric.log_state(out upto bigint, out is_busy boolean)
language plpgsql volatile as $$
declare
    v_upto bigint;
    v_announced bigint;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception 'the event log can only be read in a transaction at READ COMMITTED' using errcode = 'FF002';
    end if;
    if pg_is_in_recovery() then
        -- Writers announce themselves on the primary only, and its sequences run ahead of it here.
        -- A lost connection to the caller: the next one may reach the server that took over.
        raise exception 'the event log cannot be read on a standby' using errcode = 'read_only_sql_transaction';
    end if;
    select n.last_value into v_upto from flowfabric.event_number n;
    select min(a.number) into v_announced
    from (select l.pid, min(case when l.classid::bigint >> 16 = 7083   -- 7084: any number may follow
                                 then ((l.classid::bigint << 32) | l.objid::bigint) & ((1::bigint << 48) - 1) else 0 end) as number
          from pg_locks l
          where l.locktype = 'advisory' and l.objsubid = 1 and l.classid::bigint >> 16 in (7083, 7084)
            and l.database = (select d.oid from pg_database d where d.datname = current_database())
          group by l.pid) a
    where flowfabric.may_announce(a.pid);
    upto := least(v_upto, v_announced);
    is_busy := v_announced is not null or (select n.last_value from flowfabric.event_number n) > v_upto;
end;
$$;
