-- serves: whether a worker serves a kind in this version (null: none) with code that is not among p_not_for (null: none).
--
-- For routes that have one of the two; the others are served by every worker of the kind.
create or replace function flowfabric.serves(p_service integer, p_kind text, p_version integer, p_not_for text[])
returns boolean
language sql stable as $$
    select exists (select from flowfabric.service s
                   cross join lateral unnest(s.kinds, s.versions, s.digests) as u (kind, version, digest)
                   where s.id = p_service and u.kind = p_kind and (p_version is null or u.version = p_version)
                     and (p_not_for is null or u.digest <> all (p_not_for)))
$$;
