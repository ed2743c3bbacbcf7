-- Candidate 3: an execution row that never changes, and a token that moves from `ready` to `lease` to `ended`.
--
-- Nothing is updated. Each move writes the token again, with its index entries, and leaves a dead one where it was.
create table execution (
    partition  smallint not null,
    id         uuid not null,
    route      int not null,
    priority   int not null,
    namespace  text not null,
    lane       text not null,
    kind       text not null,
    creator    text not null,
    payload    bytea not null,
    encoding   text,
    policy     jsonb,
    created_at timestamptz not null,
    primary key (partition, id)
);
create table ready (
    route      int not null,
    priority   int not null,
    created_at timestamptz not null,
    id         uuid not null,
    partition  smallint not null,
    epoch      bigint not null,
    attempts   int not null
);
create index ready_order on ready (route, (-priority), created_at, id);
create table lease (
    partition  smallint not null,
    id         uuid not null,
    epoch      bigint not null,
    attempts   int not null,
    retries    int not null default 0,
    replays    int not null default 0,
    reclaims   int not null default 0,
    attempt_id uuid,
    lease_id   uuid,
    worker     text,
    acquired_at timestamptz,
    expires_at timestamptz,
    ended_at   timestamptz,
    delay_until timestamptz,
    changed_at timestamptz not null,
    result     bytea,
    outcome    text,
    primary key (partition, id)
);
create table ended (
    partition  smallint not null,
    id         uuid not null,
    epoch      bigint not null,
    attempts   int not null,
    retries    int not null default 0,
    replays    int not null default 0,
    reclaims   int not null default 0,
    attempt_id uuid,
    lease_id   uuid,
    worker     text,
    acquired_at timestamptz,
    expires_at timestamptz,
    ended_at   timestamptz,
    delay_until timestamptz,
    changed_at timestamptz not null,
    result     bytea,
    outcome    text,
    primary key (partition, id)
);

create function create_many(p_partition smallint[], p_id uuid[], p_payload bytea[]) returns void
language plpgsql as $$
declare
    v_now timestamptz := clock_timestamp();
begin
    insert into execution (partition, id, route, priority, namespace, lane, kind, creator, payload, created_at)
    select partition, id, 1, 0, '', 'default', 'task', '', payload, v_now
    from unnest(p_partition, p_id, p_payload) as given (partition, id, payload);

    insert into ready (route, priority, created_at, id, partition, epoch, attempts)
    select 1, 0, v_now, id, partition, 0, 0 from unnest(p_partition, p_id) as given (partition, id);
end;
$$;

create function claim(p_limit int, p_worker text)
returns table (partition smallint, id uuid, attempt_id uuid, lease_id uuid, epoch bigint, payload bytea)
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
set enable_hashjoin = off set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
    v_now timestamptz := clock_timestamp();
begin
    return query
    with picked as materialized (
        /* scan */
        select ctid as place from ready where route = 1
        order by -priority, created_at, id limit p_limit for update skip locked
        /* end */
    ), taken as (
        delete from ready as r using picked where r.ctid = picked.place
        returning r.partition, r.id, r.epoch, r.attempts
    ), claimed as (
        insert into lease (partition, id, epoch, attempts, attempt_id, lease_id, worker, acquired_at, expires_at,
                           changed_at)
        select partition, id, epoch + 1, attempts + 1, gen_random_uuid(), gen_random_uuid(), p_worker, v_now,
               v_now + interval '30 seconds', v_now
        from taken
        returning partition, id, attempt_id, lease_id, epoch, attempts, worker
    ), told as (
        insert into event (at, kind, partition, id, lease_id, epoch, attempt_id, attempt, worker)
        select v_now, 'acquired', partition, id, lease_id, epoch, attempt_id, attempts, worker from claimed
    )
    select c.partition, c.id, c.attempt_id, c.lease_id, c.epoch, e.payload
    from claimed as c join execution as e using (partition, id);
end;
$$;

create function complete(p_partition smallint[], p_id uuid[], p_lease_id uuid[]) returns bigint
language plpgsql
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
    v_now timestamptz := clock_timestamp();
    v_done bigint;
begin
    perform 1 from lease as l join unnest(p_partition, p_id) as given (partition, id) using (partition, id)
    order by l.partition, l.id for update of l;

    with freed as (
        delete from lease as l
        using unnest(p_partition, p_id, p_lease_id) as given (partition, id, lease_id)
        where l.partition = given.partition and l.id = given.id and l.lease_id = given.lease_id
        returning l.partition, l.id, l.epoch, l.attempts, l.attempt_id, l.lease_id, l.worker, l.acquired_at
    ), moved as (
        insert into ended (partition, id, epoch, attempts, attempt_id, lease_id, worker, acquired_at, ended_at,
                           changed_at, outcome)
        select partition, id, epoch, attempts, attempt_id, lease_id, worker, acquired_at, v_now, v_now, 'completed'
        from freed
    )
    insert into event (at, kind, partition, id, lease_id, epoch, attempt_id, attempt, worker, reason)
    select v_now, 'completed', partition, id, lease_id, epoch, attempt_id, attempts, worker, 'completed' from freed;
    get diagnostics v_done = row_count;
    return v_done;
end;
$$;

-- Finished executions, as if they had run long ago.
create function store_finished(p_count int) returns void
language sql as $$
    with stored as (
        insert into execution (partition, id, route, priority, namespace, lane, kind, creator, payload, created_at)
        select n % 256, gen_random_uuid(), 1, 0, '', 'default', 'task', '',
               decode(repeat(md5(n::text), 13), 'hex'), now()
        from generate_series(1, p_count) as n
        returning partition, id
    )
    insert into ended (partition, id, epoch, attempts, attempt_id, lease_id, worker, acquired_at, expires_at, ended_at,
                       changed_at, outcome)
    select partition, id, 1, 1, gen_random_uuid(), gen_random_uuid(), 'worker', now(), now(), now(), now(), 'completed'
    from stored;
$$;
