-- tag_digest: of the pair; the length distinguishes ('a', 'bc') from ('ab', 'c').
create or replace function flowfabric.tag_digest(p_key text, p_value text) returns bigint
language sql immutable as $$ select hashtextextended(length(p_key) || ':' || p_key || p_value, 7083) $$;
