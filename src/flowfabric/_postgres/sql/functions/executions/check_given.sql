-- check_given: refuse tags that are not text, and times that cannot be shown
--
-- Keeps users who may call the functions from storing values that would make the calls of others fail later. The engine
-- checks everything in detail before it sends it; this check is for other callers.
create or replace function flowfabric.check_given(p_tags text[], p_times timestamptz[], p_spans bigint[]) returns void
language plpgsql immutable as $$
begin
    if exists (select from (select distinct u.tags from unnest(p_tags) as u (tags) where u.tags is not null) t,
                      lateral (select t.tags::jsonb as tags offset 0) j
               where jsonb_typeof(j.tags) <> 'object'
                  or jsonb_path_exists(j.tags, 'strict $.* ? (@.type() != "string")')) then
        raise exception 'tags are not text' using errcode = 'invalid_parameter_value';
    end if;
    perform flowfabric.check_time(u.at) from unnest(p_times) as u (at);
    if exists (select from unnest(p_spans) as u (ms) where abs(u.ms) > 10000000000000) then
        raise exception 'a duration is not between -10^13 and 10^13 ms' using errcode = 'invalid_parameter_value';
    end if;
end;
$$;
