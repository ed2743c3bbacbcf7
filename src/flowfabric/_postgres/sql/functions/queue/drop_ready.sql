-- drop_ready: remove the ready rows of executions, if they have one, and their grants with the slots taken for them.
--
-- By position: statistics of a time when the tables were empty would make a scan of them look cheapest.
create or replace function flowfabric.drop_ready(p_partition integer[], p_id uuid[]) returns void
language plpgsql as $$
declare
    v_partitions integer[]; v_ids uuid[];
begin
    delete from flowfabric.ready r where r.ctid = any (array(
        select f.tid from unnest(p_partition, p_id) as u (partition, id)
        join flowfabric.execution e on e.partition = u.partition and e.id = u.id
        cross join lateral (select x.ctid as tid from flowfabric.ready x
                            where x.route = flowfabric.ready_route(e) and x.rank = flowfabric.rank_of(e.priority)
                              and x.created_at = e.created_at and x.id = e.id and x.partition = e.partition offset 0) f));
    with gone as (
        delete from flowfabric.claim_grant g where g.ctid = any (array(
            select f.tid from unnest(p_partition, p_id) as u (partition, id)
            cross join lateral (select x.ctid as tid from flowfabric.claim_grant x
                                where x.partition = u.partition and x.id = u.id offset 0) f))
        returning g.partition, g.id, g.quota_policy_ids
    )
    select array_agg(g.partition), array_agg(g.id) into v_partitions, v_ids from gone g where g.quota_policy_ids is not null;
    if v_ids is not null then
        perform flowfabric.give_slots(v_partitions, v_ids, true, flowfabric.now());
    end if;
end;
$$;
