-- dispatch_cascades: resolve one chunk of edges that ended executions left.
--
-- A chunk that fails as a whole is repeated one by one; an end that fails alone stays, and p_after skips it.
-- Takes    how many events and edges; the event to continue after; whose executions; p_event: only this event; p_low_water:
--          no end is left from before it.
-- Locks    pending rows, groups, downstreams; never waits.
-- Returns  how many ends were read and finished, how many edges resolved, what failed, whether there may be more.
-- Roles    work, operate
create or replace function flowfabric.dispatch_cascades(
    p_limit integer, p_edges integer, p_after bigint, p_event bigint, p_stale_ms bigint,
    p_namespace text, p_tag_key text, p_tag_value text, p_low_water timestamptz)
returns table (seen integer, finished integer, resolved integer, failed integer, message text, more boolean, last_event bigint)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_commit constant text := current_setting('synchronous_commit');
    v_seq bigint[]; v_partition integer[]; v_id uuid[]; v_run integer[]; v_outcome text[]; v_after uuid[];
    v_done boolean[]; v_next uuid[]; v_resolved integer[];
    v_one_done boolean; v_one_next uuid; v_one_resolved integer;
begin
    perform flowfabric.require_read_committed();
    -- Nothing is lost: after a crash the row is still pending. An end that a reader has seen must not be taken back.
    perform set_config('synchronous_commit', 'off', true), set_config('flowfabric.ended', '', true);
    with taken as materialized (
        select p.* from flowfabric.pending_cascade p
        where p.enqueued_at > coalesce(p_low_water, '-infinity') and p.seq > coalesce(p_after, 0) and (p_event is null or p.seq = p_event)
          and (p_stale_ms is null or p.enqueued_at <= flowfabric.now() - flowfabric.ms(p_stale_ms))
          and ((p_namespace is null and p_tag_key is null)
               or exists (select from flowfabric.execution e where e.partition = p.partition and e.id = p.id
                          and (p_namespace is null or e.namespace = p_namespace)
                          and (p_tag_key is null or coalesce(e.tags ->> p_tag_key = p_tag_value, false))))
        order by p.enqueued_at, p.seq limit p_limit
        for update skip locked
    )
    select array_agg(t.seq order by t.seq), array_agg(t.partition order by t.seq), array_agg(t.id order by t.seq),
           array_agg(t.run order by t.seq), array_agg(t.outcome order by t.seq), array_agg(t.after order by t.seq)
    into v_seq, v_partition, v_id, v_run, v_outcome, v_after
    -- Of an execution that ended twice the first end counts first; the other is for the next call.
    from (select x.*, row_number() over (partition by x.partition, x.id order by x.seq) as nth from taken x) t where t.nth = 1;
    seen := coalesce(cardinality(v_seq), 0); finished := 0; resolved := 0; failed := 0; more := false;
    if seen = 0 then
        return next;
        return;
    end if;
    last_event := v_seq[seen];
    v_now := flowfabric.now();
    begin
        select c.resolved, c.done, c.next into v_resolved, v_done, v_next
        from flowfabric.cascade(v_partition, v_id, v_run, v_outcome, v_seq, v_after, p_edges, v_now) c;
    exception
    when serialization_failure or deadlock_detected then
        raise;
    when others then
        v_resolved := array_fill(0, array[seen]); v_done := array_fill(false, array[seen]); v_next := v_after;
        for i in 1 .. seen loop
            begin
                select c.resolved[1], c.done[1], c.next[1] into v_one_resolved, v_one_done, v_one_next
                from flowfabric.cascade(v_partition[i:i], v_id[i:i], v_run[i:i], v_outcome[i:i], v_seq[i:i], v_after[i:i],
                                        p_edges, v_now) c;
                v_resolved[i] := v_one_resolved; v_done[i] := v_one_done; v_next[i] := v_one_next;
            exception when others then
                failed := failed + 1;
                message := sqlerrm;
            end;
        end loop;
    end;
    delete from flowfabric.pending_cascade p using unnest(v_seq, v_done) as u (seq, done)
    where p.seq = u.seq and u.done;
    get diagnostics finished = row_count;
    if finished < seen then
        update flowfabric.pending_cascade p set after = u.next
        from unnest(v_seq, v_done, v_next) as u (seq, done, next)
        where p.seq = u.seq and not u.done and p.after is distinct from u.next;
    end if;
    select coalesce(sum(r), 0) into resolved from unnest(v_resolved) r;
    -- There was progress, or there may be more after the ends that could not be resolved.
    more := finished + resolved > 0 or seen = p_limit;
    if current_setting('flowfabric.ended', true) = 'yes' then
        perform set_config('synchronous_commit', v_commit, true);
    end if;
    return next;
end;
$$;
