-- check_policy: refuse a policy that a later call could not read
--
-- Keeps users who may call the functions from storing values that would make the calls of others fail later. The engine
-- checks everything in detail before it sends it; this check is for other callers. Every submission pays for it, so there
-- is no query in it, and a policy of plain numbers, as most are, passes with the first expression. A value that is missing
-- is null, and refuses nothing.
create or replace function flowfabric.check_policy(p_policy json) returns void
language plpgsql immutable as $$
declare
    v jsonb := p_policy;
begin
    if jsonb_typeof(v) <> 'object'
       or flowfabric.is_no_count(v -> 'max_reclaim_count') or flowfabric.is_no_count(v -> 'max_replay_count')
       or flowfabric.is_no_count(v -> 'max_signals_per_execution')
       or (v ?| '{timeout_policy,stream_policy,suspension_policy,retry_policy,hooks}' and flowfabric.has_bad_part(v)) then
        raise exception 'a number of the policy is not between 0 and 10^14, or another value is not of its type'
            using errcode = 'invalid_parameter_value';
    end if;
end;
$$;

-- has_bad_part: whether one of the parts that have values of their own is not as check_policy wants it.
create or replace function flowfabric.has_bad_part(p_policy jsonb) returns boolean
language plpgsql immutable as $$
declare
    v_timeout jsonb := p_policy -> 'timeout_policy';
    v_stream jsonb := p_policy -> 'stream_policy';
    v_suspension jsonb := p_policy -> 'suspension_policy';
    v_retry jsonb := p_policy -> 'retry_policy';
    v_backoff jsonb := v_retry -> 'backoff';
    v_hooks jsonb := p_policy -> 'hooks';
begin
    return flowfabric.is_no_part(v_timeout) or flowfabric.is_no_count(v_timeout -> 'attempt_timeout_ms')
           or flowfabric.is_no_part(v_stream) or flowfabric.is_no_count(v_stream -> 'retention_ttl_ms')
           or flowfabric.is_no_part(v_suspension) or flowfabric.is_no_count(v_suspension -> 'default_timeout_ms')
           or flowfabric.is_no_part(v_retry) or flowfabric.is_no_count(v_retry -> 'max_retries')
           or jsonb_typeof(v_retry -> 'retryable_categories') <> 'array'
           or flowfabric.is_no_part(v_backoff) or flowfabric.is_no_count(v_backoff -> 'delay_ms')
           or flowfabric.is_no_factor(v_backoff -> 'initial_delay_ms') or flowfabric.is_no_factor(v_backoff -> 'max_delay_ms')
           or flowfabric.is_no_factor(v_backoff -> 'multiplier')
           or jsonb_typeof(v_backoff -> 'jitter') not in ('boolean', 'null')
           or flowfabric.is_no_part(v_hooks)
           or flowfabric.is_no_hook(v_hooks -> 'failure') or flowfabric.is_no_hook(v_hooks -> 'escalation');
end;
$$;

-- is_no_part: a part of a policy that is neither an object nor null.
create or replace function flowfabric.is_no_part(p jsonb) returns boolean
language sql immutable as $$ select jsonb_typeof(p) not in ('object', 'null') $$;

-- is_no_count: a value that is neither null nor an integer from 0, of 14 digits at most. A string has its quotes.
create or replace function flowfabric.is_no_count(p jsonb) returns boolean
language sql immutable as $$ select p::text !~ '^([0-9]{1,14}|null)$' $$;

-- is_no_factor: the same, with a fraction.
create or replace function flowfabric.is_no_factor(p jsonb) returns boolean
language sql immutable as $$ select p::text !~ '^([0-9]{1,14}([.][0-9]{1,30})?|null)$' $$;

-- is_no_hook: neither null nor an object with the name of a task.
create or replace function flowfabric.is_no_hook(p jsonb) returns boolean
language sql immutable as $$
    select jsonb_typeof(p) <> 'null' and (jsonb_typeof(p) <> 'object' or jsonb_typeof(p -> 'kind') is distinct from 'string')
$$;
