-- read_steps: the recorded steps of executions; of the current generation, or of all.
--
-- In the order in which they were recorded. Of those recorded in one call the place of the row decides. With p_limit at most
-- that many, after p_skip steps recorded at p_recorded_at in p_generation and all before (null: from the first): that is for
-- one execution. No index has this order, as every step would pay for it: a page looks at the times of all steps that the
-- execution has, and returns what it shows.
--
-- Roles    read, submit, work, operate
create or replace function flowfabric.read_steps(
    p_partition integer[], p_id uuid[], p_all boolean, p_generation integer, p_recorded_at timestamptz, p_skip integer,
    p_limit integer)
returns table (partition integer, id uuid, generation integer, name text, n integer, kind text, run integer,
               attempt_index integer, result bytea, encoding text, error jsonb, at timestamptz, child_partition integer,
               child_id uuid, seconds double precision, recorded_at timestamptz, waitpoint_ids uuid[], outcome text, flow_id uuid,
               is_stray boolean, is_unread boolean, place integer)
language sql stable security definer as $$
    select s.partition, s.id, s.generation, s.name, s.n, s.kind, s.run, s.attempt_index, s.result, s.encoding, s.error,
           s.at, s.child_partition, s.child_id, s.seconds, s.recorded_at, s.waitpoint_ids, s.outcome, s.flow_id, s.is_stray,
           s.is_unread, s.place
    from unnest(p_partition, p_id) as u (partition, id)
    join flowfabric.execution e on e.partition = u.partition and e.id = u.id
    join flowfabric.step s on s.partition = e.partition and s.id = e.id and (p_all or s.generation = e.generation)
    where p_generation is null or (s.generation, s.recorded_at) >= (p_generation, p_recorded_at)
    order by s.partition, s.id, s.generation, s.recorded_at, s.ctid
    offset p_skip limit p_limit
$$;
