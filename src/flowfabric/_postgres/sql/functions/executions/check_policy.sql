-- What users who may call the functions cannot store: values that would make the calls of others fail later. The engine
-- checks everything in detail before it sends it; these checks are for callers of their own.

-- check_policy: refuse a policy that a later call could not read
create or replace function flowfabric.check_policy(p_policy json) returns void
language plpgsql immutable as $$
declare
    v jsonb := p_policy;
begin
    if jsonb_typeof(v) <> 'object'
       or exists (select from unnest(array[v -> 'timeout_policy', v -> 'stream_policy', v -> 'suspension_policy',
                                           v -> 'retry_policy', v -> 'retry_policy' -> 'backoff']) as o (part)
                  where jsonb_typeof(o.part) not in ('object', 'null'))
       or exists (select from unnest(array[
                      v -> 'timeout_policy' -> 'attempt_timeout_ms', v -> 'max_reclaim_count', v -> 'max_replay_count',
                      v -> 'max_signals_per_execution', v -> 'stream_policy' -> 'retention_ttl_ms',
                      v -> 'suspension_policy' -> 'default_timeout_ms', v -> 'retry_policy' -> 'max_retries',
                      v -> 'retry_policy' -> 'backoff' -> 'delay_ms']) as n (part)
                  where jsonb_typeof(n.part) <> 'null' and n.part::text !~ '^[0-9]{1,14}$')
       or exists (select from unnest(array[
                      v -> 'retry_policy' -> 'backoff' -> 'initial_delay_ms', v -> 'retry_policy' -> 'backoff' -> 'max_delay_ms',
                      v -> 'retry_policy' -> 'backoff' -> 'multiplier']) as n (part)
                  where jsonb_typeof(n.part) <> 'null' and n.part::text !~ '^[0-9]{1,14}([.][0-9]{1,30})?$')
       or jsonb_typeof(v -> 'retry_policy' -> 'backoff' -> 'jitter') not in ('boolean', 'null')
       or jsonb_typeof(v -> 'retry_policy' -> 'retryable_categories') <> 'array' then
        raise exception 'a number of the policy is not between 0 and 10^14, or another value is not of its type'
            using errcode = 'invalid_parameter_value';
    end if;
end;
$$;

-- check_given: refuse tags that are not text, and times that cannot be shown
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
    if exists (select from unnest(p_spans) as u (ms) where u.ms not between 0 and 10000000000000) then
        raise exception 'a duration is not between 0 and 10^13 ms' using errcode = 'invalid_parameter_value';
    end if;
end;
$$;

-- check_time: refuse a time that not every reader can hold
create or replace function flowfabric.check_time(p_at timestamptz) returns void
language plpgsql immutable as $$
begin
    if isfinite(p_at) and (p_at < '0001-01-01 UTC' or p_at >= '10000-01-01 UTC') then
        raise exception 'a time is not within the years 1 to 9999' using errcode = 'invalid_parameter_value';
    end if;
end;
$$;
