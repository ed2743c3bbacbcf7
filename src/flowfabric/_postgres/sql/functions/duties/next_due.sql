-- next_due: when the next timer is due, or null.
--
-- Roles    read, submit, work, operate
create or replace function flowfabric.next_due(p_kinds text[]) returns timestamptz
language sql stable security definer as $$
    select min(f.due_at) from unnest(p_kinds) k (kind)
    cross join lateral (select t.due_at from flowfabric.timer t where t.kind = k.kind
                        order by t.due_at limit 1) f
$$;
