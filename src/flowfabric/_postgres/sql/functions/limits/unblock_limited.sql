-- unblock_limited: promote what limits have room for, one page of the limits that are due, or of all that hold executions
--
-- The duty `unblock`. Limits are due when an end found them locked, when the window of a rate has room, and when a grant with
-- a slot ends. A pass over all of them every few seconds finds what a crash left behind.
-- Takes    p_limit: how many limits. p_after, p_after_key: null: those that are due; else all after this one, from
--          the first (the zero id, empty) on. p_low_water: none is left that was due before it. p_namespace, p_tag_key, p_tag_value: of a pass: only executions of this tenant.
-- Locks    one policy at a time, in their order; then executions, skipping locked ones.
-- A page that fails as a whole is repeated one by one; a limit that fails alone is reported, and one that was due is due again
-- in 30 seconds.
-- Returns  how many executions became claimable, how many limits were looked at (of those
--          that are due: how many rows), how many failed with the last message, and
--          the last limit of a pass.
-- Roles    work, operate
create or replace function flowfabric.unblock_limited(
    p_limit integer, p_after uuid, p_after_key text, p_namespace text, p_tag_key text, p_tag_value text,
    p_low_water timestamptz)
returns table (promoted integer, looked integer, failed integer, message text, last_limit uuid, last_key text)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz := flowfabric.now();
    v_limits uuid[] := '{}'; v_keys text[] := '{}';
    v record;
begin
    perform flowfabric.require_read_committed();
    if p_after is null and num_nonnulls(p_namespace, p_tag_key) > 0 then
        raise exception 'what is due is due for all tenants' using errcode = 'invalid_parameter_value';
    end if;
    promoted := 0; failed := 0;
    if p_after is null then
        with due as (
            delete from flowfabric.limit_due d where d.ctid = any (array(
                select x.ctid from flowfabric.limit_due x
                where x.due_at > coalesce(p_low_water, '-infinity') and x.due_at <= v_now
                order by x.due_at limit p_limit for update skip locked))
            returning d.limit_id, d.key
        )
        select coalesce(array_agg(q.limit_id), '{}'), coalesce(array_agg(q.key), '{}'), (select count(*) from due)
        into v_limits, v_keys, looked
        from (select distinct d.limit_id, d.key from due d order by d.limit_id, d.key) q;
    else
        last_limit := p_after; last_key := p_after_key;
        if p_after = flowfabric.zero_uuid() then
            perform flowfabric.free_routes();
        end if;
        while cardinality(v_limits) < p_limit loop
            if cardinality(v_limits) = 0 and (p_after, p_after_key) = (flowfabric.zero_uuid(), '') then
                select b.limit_id, b.limit_key into v from flowfabric.blocked b
                where b.limit_id is not null order by b.limit_id, b.limit_key limit 1;
            else
                select b.limit_id, b.limit_key into v from flowfabric.blocked b
                where b.limit_id is not null and (b.limit_id, b.limit_key) > (last_limit, last_key)
                order by b.limit_id, b.limit_key limit 1;
            end if;
            exit when not found;
            last_limit := v.limit_id; last_key := v.limit_key;
            v_limits := v_limits || last_limit; v_keys := v_keys || last_key;
        end loop;
        looked := cardinality(v_limits);
    end if;
    begin
        promoted := flowfabric.open_limits(v_limits, v_keys, p_namespace, p_tag_key, p_tag_value);
    exception
    when serialization_failure or deadlock_detected then
        raise;
    when others then
        for i in 1 .. cardinality(v_limits) loop
            begin
                promoted := promoted + flowfabric.open_limits(
                    v_limits[i:i], v_keys[i:i], p_namespace, p_tag_key, p_tag_value);
            exception when others then
                failed := failed + 1;
                message := 'limit ' || v_limits[i] || ': ' || sqlerrm;
                if p_after is null then
                    insert into flowfabric.limit_due (due_at, limit_id, key)
                    values (v_now + interval '30 seconds', v_limits[i], v_keys[i]);
                end if;
            end;
        end loop;
    end;
    return next;
end;
$$;

-- open_limits: promote what limits have room for, one after the other; returns how many became claimable.
create or replace function flowfabric.open_limits(
    p_limits uuid[], p_keys text[], p_namespace text, p_tag_key text, p_tag_value text)
returns integer
language plpgsql as $$
declare
    v_promoted integer := 0;
begin
    for i in 1 .. cardinality(p_limits) loop
        -- Only what holds executions has a row to lock: a new one would be waited for in any order.
        if exists (select from flowfabric.blocked b where b.limit_id = p_limits[i] and b.limit_key = p_keys[i]) then
            v_promoted := v_promoted + coalesce(flowfabric.open_limit(
                p_limits[i], p_keys[i], 1000, true, p_namespace, p_tag_key, p_tag_value), 0);
        end if;
    end loop;
    return v_promoted;
end;
$$;
