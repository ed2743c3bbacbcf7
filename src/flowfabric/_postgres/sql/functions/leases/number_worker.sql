-- number_worker: the number that a worker's claims are stored with
--
-- Called by claims with a grant; claim looks the number up by itself and calls this if there is none.
-- Never waits: two claims that meet may give a worker two numbers. A number is given to claims for a day, so that it can
-- be removed some time after its last claim, although no index tells which executions have it (forget_workers).
create or replace function flowfabric.number_worker(p_worker text, p_instance text, p_now timestamptz) returns integer
language plpgsql as $$
declare
    v_number integer;
begin
    select w.id into v_number from flowfabric.worker w
    where w.worker_instance_id = p_instance and w.worker_id = p_worker
      and w.numbered_at > p_now - interval '1 day' and w.unused_since is null
    order by w.numbered_at limit 1;
    if not found then
        if greatest(octet_length(p_worker), octet_length(p_instance)) > 256 then
            raise exception 'the name of a worker is too long' using errcode = 'invalid_parameter_value';
        end if;
        insert into flowfabric.worker (worker_id, worker_instance_id, numbered_at) values (p_worker, p_instance, p_now)
        returning id into v_number;
    end if;
    return v_number;
end;
$$;
