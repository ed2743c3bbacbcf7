-- usage_amounts: the amounts of the items of a call: those of the same dimension are added up, in the order of their names
--
-- Called by apply_usage. It refuses amounts that no call may have; a sum may be too large for a budget.
-- Returns  lists of the same length, by item and dimension.
create or replace function flowfabric.usage_amounts(
    p_item integer[], p_dimension text[], p_amount bigint[], out items integer[], out dimensions text[], out amounts numeric[])
language plpgsql stable as $$
begin
    if array_position(p_dimension, null) is not null or array_position(p_amount, null) is not null
       or cardinality(p_dimension) <> cardinality(p_amount) or cardinality(p_item) <> cardinality(p_amount) or exists (
           select from unnest(p_dimension, p_amount) as u (dim, amount)
           where u.amount < 0 or u.dim = '' or octet_length(u.dim) > 256 or u.dim ~ '[[:cntrl:]]') then
        raise exception 'amounts are a dimension and a number from 0 on each' using errcode = 'invalid_parameter_value';
    end if;
    select coalesce(array_agg(q.item order by q.item, q.dim), '{}'), coalesce(array_agg(q.dim order by q.item, q.dim), '{}'),
           coalesce(array_agg(q.amount order by q.item, q.dim), '{}')
    into items, dimensions, amounts
    from (select u.item, u.dim collate "C" as dim, sum(u.amount) as amount
          from unnest(p_item, p_dimension, p_amount) as u (item, dim, amount) group by 1, 2) q;
end;
$$;
