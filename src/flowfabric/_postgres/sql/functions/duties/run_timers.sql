-- run_timers: run one round of one duty.
--
-- A round that fails as a whole is repeated one by one; an execution that fails alone is postponed by p_backoff_ms, at most
-- an hour, and reported.
-- Returns  how many were handled, how many failed with the last message, whether more timers are due.
-- Roles    work, operate
create or replace function flowfabric.run_timers(
    p_kind text, p_limit integer, p_after timestamptz, p_namespace text, p_tag_key text, p_tag_value text,
    p_backoff_ms bigint)
returns table (handled integer, failed integer, message text, more boolean, last_due_at timestamptz)
language plpgsql security definer as $$
declare
    v_now timestamptz := flowfabric.now();
    v_due flowfabric.due;
begin
    perform flowfabric.require_read_committed();
    v_due := flowfabric.due_executions(p_kind, p_limit, p_after, p_namespace, p_tag_key, p_tag_value, v_now);
    v_now := flowfabric.now();   -- not earlier than anything seen under the locks
    handled := cardinality(v_due.ids); failed := 0; more := v_due.more; last_due_at := v_due.last_due_at;
    if handled > 0 then
        begin
            perform flowfabric.act(p_kind, v_due.partitions, v_due.ids, v_now);
        exception
        when serialization_failure or deadlock_detected then
            raise;   -- not the fault of one execution: the whole round is repeated
        when others then
            handled := 0;
            for i in 1 .. cardinality(v_due.ids) loop
                begin
                    perform flowfabric.act(p_kind, array[v_due.partitions[i]], array[v_due.ids[i]], v_now);
                    handled := handled + 1;
                exception when others then
                    failed := failed + 1;
                    message := sqlerrm;
                    insert into flowfabric.timer (kind, due_at, partitions, ids)
                    values (p_kind, v_now + least(flowfabric.ms(p_backoff_ms), interval '1 hour'), array[v_due.partitions[i]], array[v_due.ids[i]]);
                end;
            end loop;
        end;
    end if;
    return next;
end;
$$;
