-- probe_waitpoint: an early check for a bridge: unknown, mismatch or ok. The delivery verifies again.
--
-- Roles    submit, work, operate
create or replace function flowfabric.probe_waitpoint(p_partition integer, p_id uuid, p_waitpoint uuid, p_token text) returns text
language sql stable security definer as $$
    select coalesce((
        select case when coalesce(flowfabric.same_bytes(
                        convert_to(p_token, 'UTF8'),
                        convert_to(flowfabric.sign_token(w.token_kid, w.partition, w.id, w.waitpoint_id), 'UTF8')), false)
                    then 'ok' else 'mismatch' end
        from flowfabric.waitpoint w
        where w.partition = p_partition and w.waitpoint_id = p_waitpoint and w.id = p_id
          and (w.state = 'active' or (w.state = 'pending' and w.expires_at > flowfabric.now()))),
        'unknown')
$$;
