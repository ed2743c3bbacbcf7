-- cancel_executions: anything that has not ended -> cancelled, for many in one call
--
-- Called by cancel, for the lease holder (source lease_holder: only with its fence), and by cancel_as_operator, with the
-- source operator_override, flow_cascade, system_timeout or a name of the caller's choice. Callers rely on which source
-- needs a fence; see the branches.
-- Takes    p_keep_children: what they submitted is not cancelled with them. p_by: the execution whose handler calls, or null.
-- Locks    the executions, by partition and id.
-- Returns  one verdict per item: ok (detail children: some are to be cancelled too; detail already: it was cancelled
--          before), replayed, or the reason it was refused.
create or replace function flowfabric.cancel_executions(
    p_partition integer[], p_id uuid[], p_lease uuid[], p_epoch bigint[], p_attempt uuid[], p_index integer[],
    p_holder boolean, p_source text, p_reason text, p_keep_children boolean, p_by uuid)
returns setof flowfabric.verdict
language plpgsql as $$
declare
    v_now timestamptz;
    v_holding integer[];
    v_free boolean := p_source in ('operator_override', 'flow_cascade', 'system_timeout');
    v_end integer[] := '{}';
    v_check integer[] := '{}';   -- items refused as the holder's call
    v flowfabric.verdict;
    e flowfabric.execution;
    v_ord integer;
begin
    perform flowfabric.require_read_committed();
    select l.at, l.ok into v_now, v_holding
    from flowfabric.lock_holders(p_partition, p_id, p_lease, p_epoch, p_attempt, p_index) l;
    for v_ord in 1 .. cardinality(p_id) loop
        select x.* into e from flowfabric.execution x where x.partition = p_partition[v_ord] and x.id = p_id[v_ord];
        v := row(v_ord, null, null, e.state, e.epoch,
                 case when e.pending = 'retry' then null else e.attempt_id end, null)::flowfabric.verdict;
        if p_holder then
            if v_ord = any (v_holding) then
                v_end := v_end || v_ord;
                v.code := 'ok';
            else
                v_check := v_check || v_ord;
                continue;
            end if;
        elsif e.id is null then
            v.code := 'not_found';
        elsif e.state = 'cancelled' or p_lease[v_ord] is not null and exists (
                select from flowfabric.attempts_of(e.partition, e.id) a
                where a.attempt_id = p_attempt[v_ord] and a.lease_id = p_lease[v_ord] and a.lease_epoch = p_epoch[v_ord]
                  and a.disposition = 'cancelled' and (p_index[v_ord] is null or a.attempt_index = p_index[v_ord])) then
            -- Even if it was replayed meanwhile: this lease did cancel it.
            v.code := 'ok'; v.detail := 'already';
        elsif e.state in ('completed', 'failed', 'expired', 'skipped') then
            v.code := 'execution_not_active';
        elsif v_free or (p_source <> 'lease_holder' and e.state <> 'active') then
            v_end := v_end || v_ord;
            v.code := 'ok';
        elsif e.state <> 'active' then
            if num_nulls(p_lease[v_ord], p_epoch[v_ord], p_attempt[v_ord]) = 0 then
                v_check := v_check || v_ord;
                continue;
            end if;
            v.code := 'execution_not_active';
        elsif num_nulls(p_lease[v_ord], p_epoch[v_ord], p_attempt[v_ord]) > 0 then
            v.code := 'invalid_input';
            v.detail := 'missing: ' || array_to_string(array_remove(array[
                case when p_lease[v_ord] is null then 'lease_id' end,
                case when p_epoch[v_ord] is null then 'lease_epoch' end,
                case when p_attempt[v_ord] is null then 'attempt_id' end], null), ', ');
        elsif v_ord = any (v_holding) then
            v_end := v_end || v_ord;
            v.code := 'ok';
        else
            v_check := v_check || v_ord;
            continue;
        end if;
        if v.code = 'ok' then
            v.state := 'cancelled';
            if v.detail is null and not p_keep_children and flowfabric.has_children(e.id) then
                v.detail := 'children';
            end if;
        end if;
        return next v;
    end loop;

    if cardinality(v_check) > 0 then
        return query select * from flowfabric.refuse_holders(
            p_partition, p_id, p_lease, p_epoch, p_attempt, p_index,
            'cancelled',
            (select coalesce(array_agg(o), '{}') from generate_subscripts(p_id, 1) o where o <> all (v_check)), v_now);
    end if;
    if cardinality(v_end) > 0 then
        if p_keep_children then
            update flowfabric.execution x set keeps_children = true from unnest(v_end) o
            where x.partition = p_partition[o] and x.id = p_id[o];
        end if;
        perform flowfabric.end_executions(
            array_agg(d.partition), array_agg(d.id), null, 'cancelled', 'cancelled', null, null,
            null, null, p_reason, d.source, 'cancelled',
            case when p_source = 'operator_override' then 'operator' else 'backend' end, false, v_now)
        from (select distinct x.partition, x.id, case when x.parent_id = p_by then 'handler' else p_source end as source
              from unnest(v_end) o join flowfabric.execution x on x.partition = p_partition[o] and x.id = p_id[o]) d
        group by d.source;
    end if;
end;
$$;
