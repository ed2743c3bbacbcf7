-- tag_digest: of the pair; the length keeps ('a', 'bc') and ('ab', 'c') apart.
create or replace function flowfabric.tag_digest(p_key text, p_value text) returns bigint
language sql immutable as $$ select hashtextextended(length(p_key) || ':' || p_key || p_value, 7083) $$;
