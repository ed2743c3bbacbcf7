-- observe_signals: the signals that ended the newest suspension of an attempt, in the order of acceptance.
--
-- Roles    read, submit, work, operate
create or replace function flowfabric.observe_signals(p_partition integer, p_id uuid, p_attempt_index integer)
returns table (signal_id uuid, signal_name text, signal_category text, source_type text, source_identity text,
               correlation_id text, accepted_at timestamptz, payload bytea, payload_encoding text, waitpoint_key text)
language sql stable security definer as $$
    select g.signal_id, g.signal_name, g.signal_category, g.source_type, g.source_identity, g.correlation_id, g.accepted_at,
           g.payload, g.payload_encoding, g.waitpoint_key
    from (select x.* from flowfabric.suspension x
          where x.partition = p_partition and x.id = p_id and x.attempt_index = p_attempt_index
          order by x.number desc limit 1) s
    cross join unnest(s.satisfier_signal_ids) as u (signal_id)
    cross join lateral (select x.* from flowfabric.signal x
                        where x.signal_id = u.signal_id and (x.partition, x.id) is not distinct from (p_partition, p_id)
                        offset 0) g
    order by g.ordinal
$$;
