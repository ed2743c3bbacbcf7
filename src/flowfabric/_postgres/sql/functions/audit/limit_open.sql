-- audit_limit_open: No execution waits for a limit that has had room for a minute, and none that was paused for amounts that
-- its budgets have.
--
-- The duty passes every few seconds; it counts as running if it, or another duty of its process, leads.
create or replace function flowfabric.audit_limit_open(
    p_low integer, p_high integer, p_from uuid, p_to uuid, p_now timestamptz) returns setof flowfabric.violation
language sql stable as $$
    select 'limit_open', w.partition, w.id, w.limit_id || ' ' || w.limit_key
    from (select distinct on (b.limit_id, b.limit_key) b.* from flowfabric.blocked b
          where b.partition between p_low and p_high and b.limit_id <> flowfabric.zero_uuid() and b.needs is null
            and b.blocked_at < p_now - interval '1 minute'
          order by b.limit_id, b.limit_key, b.rank, b.created_at, b.id) w
    left join flowfabric.quota_policy p on p.id = w.limit_id
    where exists (select from flowfabric.lead l where l.name = 'duties' and l.until > clock_timestamp() - interval '10 seconds')
      and case when w.limit_key = '' then not flowfabric.is_damaged(w.limit_id) and not exists (
                         select from flowfabric.exhausted_budgets(array[w.limit_id]))
               else (coalesce(p.max_concurrent, 0) = 0 or p.max_concurrent > (
                         select count(*) from flowfabric.quota_slot s
                         where s.policy_id = w.limit_id and s.key = w.limit_key))
                    and (coalesce(p.max_requests, 0) = 0 or p.max_requests > (
                         select count(*) from flowfabric.quota_entry e
                         where e.policy_id = w.limit_id and e.key = w.limit_key
                           and e.admitted_at > p_now - interval '1 minute' - flowfabric.window_of(p.window_seconds)))
                    and not exists (select from flowfabric.ready r where r.limits in (
                                        select x.digest from flowfabric.limit_set x where w.limit_id = any (x.quota_ids))) end
    union all
    select 'limit_open', b.partition, b.id, b.limit_id || ' ' || b.limit_key
    from flowfabric.blocked b join flowfabric.execution e on e.partition = b.partition and e.id = b.id
    where b.partition between p_low and p_high and b.limit_id is not null and b.needs is not null
      and b.blocked_at < p_now - interval '1 minute'
      and exists (select from flowfabric.lead l where l.name = 'duties' and l.until > clock_timestamp() - interval '10 seconds')
      and flowfabric.budgets_cover(flowfabric.budgets_of(e), b.needs)
$$;
