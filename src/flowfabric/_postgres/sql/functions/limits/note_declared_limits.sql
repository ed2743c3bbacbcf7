-- note_declared_limits: these declarations were stored. Returns how many are new or changed.
--
-- Locks    the declarations, by name.
-- Roles    work, operate
create or replace function flowfabric.note_declared_limits(p_names text[], p_digests text[]) returns integer
language plpgsql security definer as $$
declare
    v_count integer;
begin
    perform flowfabric.require_read_committed();
    insert into flowfabric.declared_limit as d (name, digest, declared_at)
    select u.name, u.digest, flowfabric.now() from unnest(p_names, p_digests) as u (name, digest) order by u.name
    on conflict (name) do update set digest = excluded.digest, declared_at = excluded.declared_at
    where d.digest <> excluded.digest;
    get diagnostics v_count = row_count;
    return v_count;
end;
$$;
