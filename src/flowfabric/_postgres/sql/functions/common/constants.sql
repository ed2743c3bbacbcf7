-- Constants and one-line rules that several chapters share. Immutable and plain SQL: the planner inlines their values,
-- so they cost nothing.

-- zero_uuid: lower than every id; where a scan begins, and the scope of a key outside flows.
create or replace function flowfabric.zero_uuid() returns uuid
language sql immutable as $$ select '00000000-0000-0000-0000-000000000000'::uuid $$;

-- far_date: a time that never comes, for things that do not end by themselves.
create or replace function flowfabric.far_date() returns timestamptz
language sql immutable as $$ select timestamptz '9999-12-31 00:00:00+00' $$;

-- ready_lock: the first number of the advisory locks on a route's ready rows. See queue/cover_ready.sql.
create or replace function flowfabric.ready_lock(p_route integer) returns integer
language sql immutable as $$ select 1174405120 + p_route $$;

-- partition_of: the partition, one of p_count, that follows from the id of an execution or flow: its last 16 bits.
create or replace function flowfabric.partition_of(p_id uuid, p_count integer) returns integer
language sql immutable as $$
    select (get_byte(uuid_send(p_id), 14) * 256 + get_byte(uuid_send(p_id), 15)) % p_count
$$;

-- priority_of: the stored priority for the one asked for: 0 to 9000.
create or replace function flowfabric.priority_of(p_asked integer) returns integer
language sql immutable as $$ select least(greatest(coalesce(p_asked, 0), 0), 9000) $$;

-- rank_of: the position of a priority in the order of ready rows, in which every column ascends.
create or replace function flowfabric.rank_of(p_priority integer) returns integer
language sql immutable as $$ select 9000 - p_priority $$;

-- id_time: the first 48 bits of an id.
create or replace function flowfabric.id_time(p_id uuid) returns bigint
language sql immutable as $$ select ('x' || lpad(left(replace(p_id::text, '-', ''), 12), 16, '0'))::bit(64)::bigint $$;
