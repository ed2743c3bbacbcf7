-- may_submit: one row if the fence matches and no child is recorded under this name yet, with the limit set of the
-- execution; its row stays locked until the transaction ends.
--
-- Called by submit_child, which then creates the execution and records it.
create or replace function flowfabric.may_submit(
    p_partition integer, p_id uuid, p_lease uuid, p_epoch bigint, p_attempt uuid, p_index integer, p_name text, p_n integer)
returns table (may boolean, limits bigint)
language plpgsql as $$
#variable_conflict use_column
begin
    if exists (select from flowfabric.holds_lease(p_partition, p_id, p_lease, p_epoch, p_attempt, p_index)) then
        return query
        select true, e.limits from flowfabric.execution e
        where e.partition = p_partition and e.id = p_id and not exists (
            select from flowfabric.step s
            where s.partition = e.partition and s.id = e.id and s.generation = e.generation and s.kind = 'submit'
              and s.name = p_name and s.n = p_n);
    end if;
end;
$$;
