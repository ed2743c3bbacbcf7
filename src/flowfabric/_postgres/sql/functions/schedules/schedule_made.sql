-- schedule_made: store the last execution of a schedule that fire_schedule advanced.
create or replace function flowfabric.schedule_made(p_name text, p_partition integer, p_id uuid) returns boolean
language sql as $$
    update flowfabric.schedule s set last_partition = p_partition, last_id = p_id where s.name = p_name returning true
$$;
