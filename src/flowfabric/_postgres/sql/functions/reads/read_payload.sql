-- read_payload: the input, with its kind and encoding.
--
-- Roles    read, submit, work, operate
create or replace function flowfabric.read_payload(p_partition integer, p_id uuid)
returns table (payload bytea, payload_encoding text, kind text, tags jsonb)
language sql stable security definer as $$
    select coalesce(i.payload, e.payload), case when i.payload is null then e.payload_encoding else i.encoding end, r.kind, e.tags
    from flowfabric.execution e join flowfabric.route r on r.id = e.route
    left join flowfabric.injected_input i on e.has_inputs and i.partition = e.partition and i.id = e.id
    where e.partition = p_partition and e.id = p_id
$$;
