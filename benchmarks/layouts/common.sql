-- What every candidate has: the event log, written once per transition, read by (xid, seq).
--
-- The claim and complete functions of all candidates forbid the planner what only looks good while a table is small or
-- was never analysed: without that a claim sorts the whole backlog, whatever the layout.
create table event (
    seq        bigint generated always as identity,
    xid        xid8 not null default pg_current_xact_id(),
    at         timestamptz not null,
    kind       text not null,
    partition  smallint not null,
    id         uuid not null,
    lease_id   uuid,
    epoch      bigint,
    attempt_id uuid,
    attempt    int,
    worker     text,
    reason     text
);
create index event_order on event (xid, seq);
