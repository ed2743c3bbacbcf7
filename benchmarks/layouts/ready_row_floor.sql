-- Candidate 5: as candidate 4, and a floor: a position below which no ready row lives, where the scan of a claim starts.
--
-- The floor of a route is the lowest row in `ready_floor`. A call that inserts ready rows holds the route's advisory lock
-- shared until it commits, and adds a row of its own if it inserts below the floor. A claimer now and then tries the
-- same lock exclusively: if it gets it, there is no uncommitted insert, so the first ready row it sees is the first
-- there is. Ready rows that another claimer has deleted but not committed are still seen, and stay above the floor.
create table execution (
    partition  smallint not null,
    id         uuid not null,
    state      text not null,
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
    epoch      bigint not null default 0,
    attempts   int not null default 0,
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
) with (fillfactor = 45);
create table ready (
    route      int not null,
    priority   int not null,
    created_at timestamptz not null,
    id         uuid not null,
    partition  smallint not null
);
create index ready_order on ready (route, (-priority), created_at, id);
create table ready_floor (
    route      int not null,
    urgency    int not null, -- the priority with its sign turned: less is sooner
    created_at timestamptz not null,
    id         uuid not null
);
insert into ready_floor values (1, -2147483647, '-infinity', '00000000-0000-0000-0000-000000000000');

create function raise_floor(p_route int) returns void
language plpgsql as $$
declare
    v_first record;
begin
    -- A snapshot older than the lock would miss what was committed in between.
    if current_setting('transaction_isolation') <> 'read committed'
       or not pg_try_advisory_xact_lock(77, p_route) then
        return;
    end if;
    select first.* into v_first
    from (select urgency, created_at, id from ready_floor where route = p_route
          order by urgency, created_at, id limit 1) as floor,
         lateral (select -r.priority as urgency, r.created_at, r.id from ready as r
                  where r.route = p_route
                    and (-r.priority, r.created_at, r.id) >= (floor.urgency, floor.created_at, floor.id)
                  order by -r.priority, r.created_at, r.id limit 1) as first;
    if found then
        delete from ready_floor where route = p_route;
        insert into ready_floor values (p_route, v_first.urgency, v_first.created_at, v_first.id);
    end if;
end;
$$;

-- Called after the route's lock is held shared. A transaction with an old snapshot cannot see the floor as it is now
-- and adds its row in any case.
create function lower_floor(p_route int, p_priority int, p_created_at timestamptz, p_id uuid) returns void
language sql as $$
    insert into ready_floor
    select p_route, -p_priority, p_created_at, p_id
    where current_setting('transaction_isolation') <> 'read committed'
       or (-p_priority, p_created_at, p_id) < (
              select urgency, created_at, id from ready_floor where route = p_route
              order by urgency, created_at, id limit 1);
$$;

create function create_many(p_partition smallint[], p_id uuid[], p_payload bytea[]) returns void
language plpgsql as $$
declare
    v_now timestamptz;
begin
    perform pg_advisory_xact_lock_shared(77, 1);
    v_now := clock_timestamp();
    insert into execution (partition, id, state, route, priority, namespace, lane, kind, creator, payload, created_at,
                           changed_at)
    select partition, id, 'waiting', 1, 0, '', 'default', 'task', '', payload, v_now, v_now
    from unnest(p_partition, p_id, p_payload) as given (partition, id, payload);

    insert into ready (route, priority, created_at, id, partition)
    select 1, 0, v_now, id, partition from unnest(p_partition, p_id) as given (partition, id);
    perform lower_floor(1, 0, v_now, (select id from unnest(p_id) as id order by id limit 1));
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
    v_floor ready_floor;
begin
    -- About once in 2,000 jobs, however many a claim takes.
    if random() < p_limit / 2000.0 then
        perform raise_floor(1);
    end if;
    select * into v_floor from ready_floor where route = 1 order by urgency, created_at, id limit 1;

    return query
    with picked as materialized (
        /* scan */
        select ctid as place from ready where route = 1
          and (-priority, created_at, id) >= (v_floor.urgency, v_floor.created_at, v_floor.id)
        order by -priority, created_at, id limit p_limit for update skip locked
        /* end */
    ), taken as (
        delete from ready as r using picked where r.ctid = picked.place returning r.partition, r.id
    ), claimed as (
        update execution as e
        set state = 'active', epoch = e.epoch + 1, attempts = e.attempts + 1, attempt_id = gen_random_uuid(),
            lease_id = gen_random_uuid(), worker = p_worker, acquired_at = v_now,
            expires_at = v_now + interval '30 seconds', changed_at = v_now
        from taken where e.partition = taken.partition and e.id = taken.id
        returning e.partition, e.id, e.attempt_id, e.lease_id, e.epoch, e.attempts, e.worker, e.payload
    ), told as (
        insert into event (at, kind, partition, id, lease_id, epoch, attempt_id, attempt, worker)
        select v_now, 'acquired', partition, id, lease_id, epoch, attempt_id, attempts, worker from claimed
    )
    select partition, id, attempt_id, lease_id, epoch, payload from claimed;
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
    perform 1 from execution as e join unnest(p_partition, p_id) as given (partition, id) using (partition, id)
    order by e.partition, e.id for no key update of e;

    with ended as (
        update execution as e
        set state = 'completed', ended_at = v_now, changed_at = v_now, outcome = 'completed'
        from unnest(p_partition, p_id, p_lease_id) as given (partition, id, lease_id)
        where e.partition = given.partition and e.id = given.id and e.lease_id = given.lease_id and e.state = 'active'
        returning e.partition, e.id, e.lease_id, e.epoch, e.attempt_id, e.attempts, e.worker
    )
    insert into event (at, kind, partition, id, lease_id, epoch, attempt_id, attempt, worker, reason)
    select v_now, 'completed', partition, id, lease_id, epoch, attempt_id, attempts, worker, 'completed' from ended;
    get diagnostics v_done = row_count;
    return v_done;
end;
$$;

-- Finished executions, as if they had run long ago.
create function store_finished(p_count int) returns void
language sql as $$
    insert into execution (partition, id, state, route, priority, namespace, lane, kind, creator, payload, created_at,
                           epoch, attempts, attempt_id, lease_id, worker, acquired_at, expires_at, ended_at, changed_at,
                           outcome)
    select n % 256, gen_random_uuid(), 'completed', 1, 0, '', 'default', 'task', '',
           decode(repeat(md5(n::text), 13), 'hex'),
           now(), 1, 1, gen_random_uuid(), gen_random_uuid(), 'worker', now(), now(), now(), now(), 'completed'
    from generate_series(1, p_count) as n;
$$;
