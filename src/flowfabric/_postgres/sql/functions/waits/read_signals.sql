-- read_signals: the signals that an execution accepted, in order, for people and tests.
--
-- Roles    read, submit, work, operate
create or replace function flowfabric.read_signals(p_partition integer, p_id uuid, p_after integer, p_limit integer)
returns table (ordinal integer, signal_id uuid, waitpoint_id uuid, waitpoint_key text, suspension_id uuid, signal_name text,
               signal_category text, source_type text, source_identity text, correlation_id text, payload bytea,
               payload_encoding text, target_scope text, created_at timestamptz, accepted_at timestamptz,
               observed_effect text, match_detail text, refused text)
language sql stable security definer as $$
    select g.ordinal, g.signal_id, g.waitpoint_id, g.waitpoint_key, g.suspension_id, g.signal_name, g.signal_category,
           g.source_type, g.source_identity, g.correlation_id, g.payload, g.payload_encoding, g.target_scope, g.created_at,
           g.accepted_at, g.observed_effect, g.match_detail, g.refused
    from flowfabric.signal g
    where g.partition = p_partition and g.id = p_id and g.ordinal > p_after and not g.is_dropped
    order by g.ordinal limit p_limit
$$;
