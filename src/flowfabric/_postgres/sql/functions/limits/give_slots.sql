-- give_slots: executions leave their slots, in the transaction in which they leave `active` or lose a grant
--
-- Called under the locks of the executions, only for those with limits. A slot is handed to the executions that wait for it
-- if the policy's lock can be had at once; else the duty does that: an end never waits for a limit.
-- Takes    p_granted: only slots of grants.
create or replace function flowfabric.give_slots(
    p_partition integer[], p_id uuid[], p_granted boolean, p_now timestamptz) returns void
language plpgsql as $$
declare
    v record;
begin
    for v in
        with gone as (
            delete from flowfabric.quota_slot s where s.ctid = any (array(
                select f.tid from unnest(p_partition, p_id) as u (partition, id)
                cross join lateral (select x.ctid as tid from flowfabric.quota_slot x
                                    where x.id = u.id and x.partition = u.partition
                                      and (not p_granted or x.until is not null) offset 0) f))
            returning s.policy_id, s.key
        ), freed as (
            select g.policy_id, g.key, count(*)::integer as n from gone g group by g.policy_id, g.key
        )
        select f.* from freed f
        where exists (select from (select b.limit_id from flowfabric.blocked b
                                   where b.limit_id = f.policy_id and b.limit_key = f.key offset 0) w)
        order by f.policy_id, f.key
    loop
        if flowfabric.open_limit(v.policy_id, v.key, v.n, false, null, null, null) is null then
            perform flowfabric.look_at_limit(v.policy_id, v.key, p_now, p_now);
        end if;
    end loop;
end;
$$;
