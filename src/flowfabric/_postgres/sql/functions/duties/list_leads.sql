-- list_leads: which process leads each group of duties, and until when; its worker, if that is registered
--
-- Only operators see the process, because with it a caller can lead in its place.
-- Roles    read, work, operate
create or replace function flowfabric.list_leads()
returns table (name text, process uuid, left_ms double precision, worker_instance_id text)
language sql volatile security definer as $$
    select l.name, case when flowfabric.may_operate() then l.instance end, extract(epoch from l.until - clock_timestamp())::double precision * 1000,
           (select r.worker_instance_id from flowfabric.registration r where r.process = l.instance
            order by r.worker_instance_id limit 1)
    from flowfabric.lead l where l.until > clock_timestamp() order by l.name
$$;
