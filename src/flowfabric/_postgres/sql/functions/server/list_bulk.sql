-- list_bulk: one bulk job, or those that run, oldest first
--
-- Takes    p_id: null: those that run. p_namespaces: only jobs of one of these; null: all.
-- Roles    work, operate
create or replace function flowfabric.list_bulk(
    p_id uuid, p_namespaces text[], p_limit integer)
returns table (id uuid, operation text, state text, reason text, actor text, key_id text, created_at timestamptz,
               ended_at timestamptz, namespace text, lanes text[], kinds text[], states text[], tag_key text, tag_value text,
               flow_id uuid, parent_id uuid, created_from timestamptz, created_before timestamptz, changed bigint,
               unchanged bigint, refused bigint, refusals text, failure text)
language plpgsql stable security definer as $$
#variable_conflict use_column
declare
    b flowfabric.bulk_job;
begin
    for b in
        select j.* from flowfabric.bulk_job j where j.id = p_id
        union all
        (select j.* from flowfabric.bulk_job j
         where p_id is null and j.state = 'running'
         order by j.created_at, j.id limit p_limit)
    loop
        continue when p_namespaces is not null and (b.namespace is null or b.namespace <> all (p_namespaces));
        id := b.id; operation := b.operation; state := b.state; reason := b.reason; actor := b.actor; key_id := b.key_id;
        created_at := b.created_at; ended_at := b.ended_at; namespace := b.namespace; lanes := b.lanes; kinds := b.kinds;
        states := b.states; tag_key := b.tag_key; tag_value := b.tag_value; flow_id := b.flow_id; parent_id := b.parent_id;
        created_from := b.created_from; created_before := b.created_before; changed := b.changed; unchanged := b.unchanged;
        refused := b.refused; refusals := b.refusals::text; failure := b.failure;
        return next;
    end loop;
end;
$$;
