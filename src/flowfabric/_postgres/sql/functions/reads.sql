-- Reads see committed state and take no lock that a writer waits for.

create or replace function flowfabric.read_execution(p_partition integer, p_id uuid)
returns setof flowfabric.execution_view
language sql stable security definer set search_path = flowfabric, pg_temp as $$
    select v.* from flowfabric.execution_view v where v.partition = p_partition and v.id = p_id
$$;

-- read_payload: the input, with what a worker needs to make sense of it.
create or replace function flowfabric.read_payload(p_partition integer, p_id uuid)
returns table (payload bytea, payload_encoding text, kind text, tags jsonb)
language sql stable security definer set search_path = flowfabric, pg_temp as $$
    select coalesce(i.payload, e.payload), case when i.payload is null then e.payload_encoding else i.encoding end, r.kind, e.tags
    from flowfabric.execution e join flowfabric.route r on r.id = e.route
    left join flowfabric.injected_input i on e.has_inputs and i.partition = e.partition and i.id = e.id
    where e.partition = p_partition and e.id = p_id
$$;

-- read_result: the result, if the execution completed and one was given.
create or replace function flowfabric.read_result(p_partition integer, p_id uuid)
returns table (result bytea, result_encoding text)
language sql stable security definer set search_path = flowfabric, pg_temp as $$
    select e.result, e.result_encoding from flowfabric.execution e
    where e.partition = p_partition and e.id = p_id and e.state = 'completed' and e.result is not null
$$;

create or replace function flowfabric.list_attempts(p_partition integer, p_id uuid)
returns setof flowfabric.attempt
language sql stable security definer set search_path = flowfabric, pg_temp as $$
    select a.* from flowfabric.attempts_of(p_partition, p_id) a order by a.attempt_index
$$;

-- set_tag: answers whether the execution exists.
create or replace function flowfabric.set_tag(p_partition integer, p_id uuid, p_key text, p_value text) returns boolean
language plpgsql security definer set search_path = flowfabric, pg_temp as $$
declare
    e flowfabric.execution;
begin
    select x.* into e from flowfabric.execution x where x.partition = p_partition and x.id = p_id for no key update;
    if not found then
        return false;
    end if;
    delete from flowfabric.tag t
    where t.digest = flowfabric.tag_digest(p_key, e.tags ->> p_key) and t.created_at = e.created_at and t.id = e.id
      and t.partition = e.partition;
    insert into flowfabric.tag (digest, created_at, id, partition)
    values (flowfabric.tag_digest(p_key, p_value), e.created_at, e.id, e.partition);
    update flowfabric.execution x
    set tags = coalesce(x.tags, '{}') || jsonb_build_object(p_key, p_value), mutated_at = flowfabric.now()
    where x.partition = p_partition and x.id = p_id;
    return true;
end;
$$;

-- list_partition: executions of one partition by id.
create or replace function flowfabric.list_partition(p_partition integer, p_after uuid, p_limit integer)
returns setof flowfabric.execution_view
language sql stable security definer set search_path = flowfabric, pg_temp as $$
    select v.* from flowfabric.execution_view v
    where v.partition = p_partition and v.id >= coalesce(p_after, '00000000-0000-0000-0000-000000000000'::uuid)
      and v.id is distinct from p_after
    order by v.id limit p_limit
$$;

-- list_expired_leases: active executions whose lease had lapsed at a time, marked or not; revoked ones are not here.
create or replace function flowfabric.list_expired_leases(
    p_as_of timestamptz, p_after_at timestamptz, p_after_id text, p_limit integer, p_namespace text)
returns table (partition integer, id uuid, lease_id uuid, epoch bigint, worker_instance_id text,
               lease_expires_at timestamptz, attempt_index integer)
language sql stable security definer set search_path = flowfabric, pg_temp as $$
    select e.partition, e.id, e.lease_id, e.epoch, e.worker_instance_id, e.lease_expires_at, e.attempt_index
    from (select u.partition, u.id from flowfabric.timer t
          cross join lateral unnest(t.partitions, t.ids) as u (partition, id)
          where t.kind = 'lease' and t.due_at <= p_as_of
          union
          select r.partition, r.id from flowfabric.ready r where r.available_at is not null) c
    join flowfabric.execution e on e.partition = c.partition and e.id = c.id
    where e.state = 'active' and e.lease_lost is distinct from 'revoked' and e.lease_expires_at <= p_as_of
      and (p_namespace is null or e.namespace = p_namespace)
      and (p_after_at is null
           or (e.lease_expires_at, flowfabric.id_text(e.partition, e.id) collate "C") > (p_after_at, p_after_id))
    order by e.lease_expires_at, flowfabric.id_text(e.partition, e.id) collate "C" limit p_limit
$$;

create or replace function flowfabric.id_text(p_partition integer, p_id uuid) returns text
language sql immutable as $$ select '{fp:' || p_partition || '}:' || p_id $$;
