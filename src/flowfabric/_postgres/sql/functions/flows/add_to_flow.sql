-- add_to_flow: make executions members, all or none
--
-- Locks    the flow, then the executions, by id.
-- Returns  one row: ok, already_member (all of them were; number: the members now) or why not, with the index of the
--          first refused execution and, for execution_already_in_flow, the other flow.
-- Roles    operate
create or replace function flowfabric.add_to_flow(p_partition integer, p_flow uuid, p_id uuid[])
returns table (code text, place integer, other uuid, members integer)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_new integer;
begin
    perform flowfabric.require_read_committed();
    code := flowfabric.open_flow(p_partition, p_flow, true);
    if code is null then
        perform flowfabric.lock_members(p_partition, p_id);
        select case when e.id is null then 'execution_not_found' else 'execution_already_in_flow' end, u.ord::integer, e.flow_id
        into code, place, other
        from unnest(p_id) with ordinality as u (id, ord)
        left join lateral (select x.* from flowfabric.execution x where x.partition = p_partition and x.id = u.id offset 0) e on true
        where e.id is null or e.flow_id <> p_flow
        order by u.ord limit 1;
    end if;
    if code is null then
        v_now := flowfabric.now();
        update flowfabric.execution e set flow_id = p_flow, mutated_at = v_now
        from (select distinct x.tid from unnest(p_id) u (id)
              cross join lateral (select y.ctid as tid from flowfabric.execution y
                                  where y.partition = p_partition and y.id = u.id and y.flow_id is null offset 0) x) n
        where e.ctid = n.tid;
        get diagnostics v_new = row_count;
        code := case when v_new = 0 then 'already_member' else 'ok' end;
        if v_new > 0 then
            update flowfabric.flow f set node_count = f.node_count + v_new, last_mutation_at = v_now
            where f.partition = p_partition and f.flow_id = p_flow;
            insert into flowfabric.flow_touched values (p_partition, p_flow);
            -- An execution that ended before it became a member needs no cascade: it has no edges yet.
            perform flowfabric.wake_for(array_fill(p_partition, array[cardinality(p_id)]), p_id);   -- a claim skipped them
        end if;
        select f.node_count into members from flowfabric.flow f where f.partition = p_partition and f.flow_id = p_flow;
    end if;
    return next;
end;
$$;
