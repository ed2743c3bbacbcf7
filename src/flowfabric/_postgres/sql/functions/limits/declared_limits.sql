-- read_declared_limits: the digests of declarations that were stored last.
--
-- Roles    work, operate
create or replace function flowfabric.read_declared_limits(p_names text[]) returns table (name text, digest text)
language sql stable security definer as $$
    select d.name, d.digest from flowfabric.declared_limit d where d.name = any (p_names collate "C")
$$;

-- note_declared_limits: these declarations were stored. Returns how many are new or changed.
--
-- Locks    the declarations, by name.
-- Roles    work, operate
create or replace function flowfabric.note_declared_limits(p_names text[], p_digests text[]) returns integer
language plpgsql security definer as $$
declare
    v_count integer;
begin
    insert into flowfabric.declared_limit as d (name, digest, declared_at)
    select u.name, u.digest, flowfabric.now() from unnest(p_names, p_digests) as u (name, digest) order by u.name
    on conflict (name) do update set digest = excluded.digest, declared_at = excluded.declared_at
    where d.digest <> excluded.digest;
    get diagnostics v_count = row_count;
    return v_count;
end;
$$;
