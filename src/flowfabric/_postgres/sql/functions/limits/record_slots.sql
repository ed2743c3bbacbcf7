-- record_slots: the slots of executions that were admitted, and their entries in the windows of rates.
--
-- Called under the locks of the executions and of the heads. An execution with a lost lease has its slot, whatever becomes of
-- a grant to reclaim it; if not, it gets one unchecked. Takes p_slotted: policies and ids (with a space between) that had a slot before: their entry stays.
create or replace function flowfabric.record_slots(
    p_partition integer[], p_id uuid[], p_slotted text[], p_until timestamptz, p_now timestamptz) returns void
language plpgsql as $$
begin
    with admitted as materialized (
        select e.partition, e.id, e.lease_lost is not null as lost, p.id as policy_id, k.key, p.max_requests
        from unnest(p_partition, p_id) as u (partition, id)
        join flowfabric.execution e on e.partition = u.partition and e.id = u.id
        cross join lateral (select x.* from flowfabric.limit_set x where x.digest = e.limits limit 1) l
        cross join lateral unnest(l.quota_ids, l.quota_keys) as k (id, key)
        join flowfabric.quota_policy p on p.id = k.id and (p.max_requests > 0 or p.max_concurrent > 0)
    ), entered as (
        insert into flowfabric.quota_entry as e (policy_id, key, id, partition, admitted_at)
        select a.policy_id, a.key, a.id, a.partition, p_now from admitted a
        where a.max_requests > 0 and not a.lost and (a.policy_id || ' ' || a.id = any (p_slotted)) is not true
        on conflict (id, partition, policy_id, key) do update set admitted_at = excluded.admitted_at
    ), due as (
        -- A grant that ends unused leaves its slot to another.
        insert into flowfabric.limit_due (due_at, limit_id, key)
        select distinct p_until, a.policy_id, a.key from admitted a where p_until is not null and not a.lost
    )
    insert into flowfabric.quota_slot as s (id, partition, policy_id, key, admitted_at, until, origin)
    select a.id, a.partition, a.policy_id, a.key, p_now, case when not a.lost then p_until end,
           case when a.lost then 'override' else 'scheduler' end
    from admitted a
    -- One that ended may be of another key, whose floor is another. One that a direct caller took outlives a shorter grant.
    on conflict (id, partition, policy_id) do update
    set until = excluded.until, key = case when s.until <= p_now then excluded.key else s.key end, number = default
    where s.until is distinct from excluded.until and (s.origin = 'direct' and s.until > excluded.until) is not true;
end;
$$;
