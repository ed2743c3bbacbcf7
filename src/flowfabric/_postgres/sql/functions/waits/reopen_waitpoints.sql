-- reopen_waitpoints: the waitpoints of a wait that asks again are pending again, with the signals they have
--
-- Called by refuse_signals and open_wait, under the lock of the execution, for a caller that holds its lease. Ids and tokens
-- stay, so links that were sent lead here again. Only a token whose key verifies nothing any more is signed again.
-- Takes    p_anew: whether its time begins again, and it may be escalated again.
create or replace function flowfabric.reopen_waitpoints(
    p_partition integer, p_id uuid, p_waitpoints uuid[], p_schema text, p_anew boolean, p_now timestamptz)
returns void
language plpgsql as $$
begin
    update flowfabric.waitpoint w
    set state = 'pending', suspension_id = null, attempt_index = e.attempt_index, activated_at = null,
        expires_at = flowfabric.far_date(), required_signal_names = '{}', counted_by = '{}', dropped_upto = 0,
        satisfied_at = null, closed_at = null, close_reason = null, payload_schema = p_schema,
        is_escalated = w.is_escalated and not p_anew,
        matched_signal_count = (select count(*) from flowfabric.signal g where g.partition = p_partition
                                and g.waitpoint_id = w.waitpoint_id and g.match_detail = 'advanced'),
        token_kid = case when exists (select from flowfabric.keystore k where k.kid = w.token_kid
                                      and (k.state = 'current' or k.state = 'verifying' and k.expires_at >= p_now))
                         then w.token_kid
                         else coalesce((select k.kid from flowfabric.keystore k where k.state = 'current'), w.token_kid) end
    from flowfabric.execution e, unnest(p_waitpoints) as u (waitpoint_id)
    cross join lateral (select x.ctid as tid from flowfabric.waitpoint x
                        where x.partition = p_partition and x.waitpoint_id = u.waitpoint_id and x.id = p_id offset 0) f
    where w.ctid = f.tid and e.partition = p_partition and e.id = p_id;
end;
$$;
