-- audit_quota_slot: A slot without an end of its own belongs to an active execution, and is not below the floor of its head.
create or replace function flowfabric.audit_quota_slot(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    select 'quota_slot', s.partition, s.id, s.policy_id || ' ' || s.key from flowfabric.quota_slot s
    where s.partition between p_low and p_high
      and ((s.until is null and not exists (
                select from flowfabric.execution e where e.partition = s.partition and e.id = s.id and e.state = 'active'))
           or s.number < (select h.floor from flowfabric.quota_head h where h.policy_id = s.policy_id and h.key = s.key))
$$;
