-- insert_given: insert_executions for ids that the caller gave, which another call may take meanwhile
--
-- Called by create_executions, with p_code: why an item is not created (null: it may be).
-- Locks    the ids, in the order of the items.
-- Returns  how many are claimable immediately, and the codes, with 'exists' for ids that were taken.
create or replace function flowfabric.insert_given(
    p_routes integer[], p_code text[], p_route_no integer[], p_partition integer[], p_id uuid[], p_namespace text[],
    p_creator text[], p_payload bytea[], p_payload_encoding text[], p_priority integer[], p_key text[], p_tags text[],
    p_policy text[], p_limits bigint[], p_delay_until timestamptz[], p_delay_ms bigint[],
    p_deadline_at timestamptz[], p_deadline_ms bigint[], p_now timestamptz, out made integer, out code text[])
language plpgsql as $$
declare
    v_found text[];
begin
    code := p_code;
    while made is null loop
        begin
            made := flowfabric.insert_executions(
                p_routes, code, p_route_no, p_partition, p_id, p_namespace, p_creator, p_payload, p_payload_encoding,
                p_priority, null, p_key, p_tags, p_policy, p_limits, p_delay_until, p_delay_ms, p_deadline_at,
                p_deadline_ms, p_now, null, null, null);
        exception when unique_violation then
            select array_agg(coalesce(code[u.ord], case when e.id is not null then 'exists' end) order by u.ord)
            into v_found
            from unnest(p_partition, p_id) with ordinality as u (partition, id, ord)
            left join flowfabric.execution e on e.partition = u.partition and e.id = u.id;
            if v_found is not distinct from code then
                raise exception 'an execution id was taken by a transaction this one cannot see'
                    using errcode = 'serialization_failure';
            end if;
            code := v_found;
        end;
    end loop;
end;
$$;
