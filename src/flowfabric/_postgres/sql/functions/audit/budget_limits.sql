-- audit_budget_limits: No strict budget has used and held more than a hard limit, unless the limit was set below that.
create or replace function flowfabric.audit_budget_limits(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    select 'budget_limits', 0, b.id, format('%s: %s used, %s held of %s', d.dim, d.used, d.held, d.hard)
    from flowfabric.budget b
    cross join lateral (select x.* from flowfabric.budget_head x where x.budget_id = b.id order by x.seq desc limit 1) h
    cross join lateral unnest(h.dimensions, h.used, h.held, h.hard) as d (dim, used, held, hard)
    where p_low = 0 and (d.used < 0 or d.held < 0
          or h.is_strict and not b.is_lowered and d.hard > 0 and coalesce(d.used, 0)::numeric + d.held > d.hard)
$$;
