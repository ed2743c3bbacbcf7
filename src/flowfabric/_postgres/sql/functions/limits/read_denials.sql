-- read_denials: how many executions claims were denied, by reason and dimension, since the schema was created.
--
-- Roles    read, operate
create or replace function flowfabric.read_denials() returns table (reason text, dimension text, count bigint)
language sql stable security definer as $$
    select d.reason, d.dimension, sum(d.count)::bigint
    from (select t.reason, t.dimension, t.count from flowfabric.denial_total t
          union all
          select x.reason, x.dimension, x.count from flowfabric.denial x) d
    group by d.reason, d.dimension order by 1, 2
$$;
