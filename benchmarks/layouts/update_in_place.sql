-- Candidate 1: one wide row per execution, updated in place; a partial index holds the claimable ones.
--
-- The state is in the predicate of the index, so a claim is never HOT: it writes an entry into every other index and
-- leaves a dead one at the head of the claim index, where the next claim starts to read.
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
) with (fillfactor = 80);
create index execution_ready on execution (route, (-priority), created_at, id) where state = 'waiting';

create function create_many(p_partition smallint[], p_id uuid[], p_payload bytea[]) returns void
language plpgsql as $$
declare
    v_now timestamptz := clock_timestamp();
begin
    insert into execution (partition, id, state, route, priority, namespace, lane, kind, creator, payload, created_at,
                           changed_at)
    select partition, id, 'waiting', 1, 0, '', 'default', 'task', '', payload, v_now, v_now
    from unnest(p_partition, p_id, p_payload) as given (partition, id, payload);
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
        select ctid as place from execution where route = 1 and state = 'waiting'
        order by -priority, created_at, id limit p_limit for update skip locked
        /* end */
    ), claimed as (
        update execution as e
        set state = 'active', epoch = e.epoch + 1, attempts = e.attempts + 1, attempt_id = gen_random_uuid(),
            lease_id = gen_random_uuid(), worker = p_worker, acquired_at = v_now,
            expires_at = v_now + interval '30 seconds', changed_at = v_now
        from picked where e.ctid = picked.place
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
