-- read_declared_limits: the digests of declarations that were stored last.
--
-- Roles    work, operate
create or replace function flowfabric.read_declared_limits(p_names text[]) returns table (name text, digest text)
language sql stable security definer as $$
    select d.name, d.digest from flowfabric.declared_limit d where d.name = any (p_names collate "C")
$$;
