-- audit_budget_counters: The counters of breaches never decrease, and neither does the generation.
create or replace function flowfabric.audit_budget_counters(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    select 'budget_counters', 0, h.budget_id, h.seq::text
    from (select x.budget_id, x.seq, x.breaches, x.soft_breaches, x.generation,
                 lag(x.breaches) over w as breaches_before, lag(x.soft_breaches) over w as soft_before,
                 lag(x.generation) over w as generation_before
          from flowfabric.budget_head x where p_low = 0
          window w as (partition by x.budget_id order by x.seq)) h
    where h.breaches < h.breaches_before or h.soft_breaches < h.soft_before or h.generation < h.generation_before
$$;
