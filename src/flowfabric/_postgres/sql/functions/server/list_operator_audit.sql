-- list_operator_audit: rows of the audit log, newest first
--
-- One call looks at p_most rows at most.
-- Takes    p_before: the number before which to continue, or null. p_target: a target, or one of the ids of a target
--          that names several. The others: null: any.
-- Returns  the rows, then one with nothing but the number to continue before, unless all were read.
-- Roles    operate
create or replace function flowfabric.list_operator_audit(
    p_actor text, p_key text, p_operation text, p_target text, p_outcome text, p_from timestamptz, p_to timestamptz,
    p_before bigint, p_limit integer, p_most integer)
returns table (seq bigint, at timestamptz, actor text, key_id text, address text, operation text, target text, outcome text,
               request_id text)
language plpgsql stable security definer as $$
#variable_conflict use_column
declare
    v_row flowfabric.operator_audit;
    v_seen integer := 0;
    v_found integer := 0;
    v_last bigint;
begin
    for v_row in select a.* from flowfabric.operator_audit a where a.seq < coalesce(p_before, 9223372036854775807)
                 order by a.seq desc limit p_most + 1 loop
        if v_found = p_limit or v_seen = p_most then
            at := null; actor := null; key_id := null; address := null; operation := null; target := null;
            outcome := null; request_id := null;
            seq := v_last;
            return next;
            return;
        end if;
        v_seen := v_seen + 1;
        v_last := v_row.seq;
        if (p_actor is null or v_row.actor = p_actor) and (p_key is null or v_row.key_id = p_key)
           and (p_operation is null or v_row.operation = p_operation)
           and (p_target is null or v_row.target = p_target or p_target = any (string_to_array(v_row.target, ', ')))
           and (p_outcome is null or v_row.outcome = p_outcome) and (p_from is null or v_row.at >= p_from)
           and (p_to is null or v_row.at < p_to) then
            v_found := v_found + 1;
            seq := v_row.seq; at := v_row.at; actor := v_row.actor; key_id := v_row.key_id; address := v_row.address;
            operation := v_row.operation; target := v_row.target; outcome := v_row.outcome; request_id := v_row.request_id;
            return next;
        end if;
    end loop;
end;
$$;
