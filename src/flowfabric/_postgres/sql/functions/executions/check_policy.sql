-- check_policy: refuse a policy that a later call could not read
--
-- What users who may call the functions cannot store: values that would make the calls of others fail later. The engine
-- checks everything in detail before it sends it; this is for callers of their own.
create or replace function flowfabric.check_policy(p_policy json) returns void
language plpgsql immutable as $$
declare
    v jsonb := p_policy;
begin
    if jsonb_typeof(v) <> 'object'
       or exists (select from unnest(array[v -> 'timeout_policy', v -> 'stream_policy', v -> 'suspension_policy',
                                           v -> 'retry_policy', v -> 'retry_policy' -> 'backoff', v -> 'hooks',
                                           v -> 'hooks' -> 'failure', v -> 'hooks' -> 'escalation']) as o (part)
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
       or exists (select from unnest(array[v -> 'hooks' -> 'failure', v -> 'hooks' -> 'escalation']) as h (part)
                  where jsonb_typeof(h.part) = 'object' and jsonb_typeof(h.part -> 'kind') is distinct from 'string')
       or jsonb_typeof(v -> 'retry_policy' -> 'backoff' -> 'jitter') not in ('boolean', 'null')
       or jsonb_typeof(v -> 'retry_policy' -> 'retryable_categories') <> 'array' then
        raise exception 'a number of the policy is not between 0 and 10^14, or another value is not of its type'
            using errcode = 'invalid_parameter_value';
    end if;
end;
$$;
