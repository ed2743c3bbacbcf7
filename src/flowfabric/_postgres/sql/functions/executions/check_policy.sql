-- check_policy: refuse a policy that a later call could not read
--
-- The engine checks policies in detail before it sends them. This is for callers of their own: without it a policy could
-- make the claims of everybody fail.
create or replace function flowfabric.check_policy(p_policy json) returns void
language plpgsql immutable as $$
declare
    v_retry constant json := p_policy -> 'retry_policy';
    v_backoff constant json := v_retry -> 'backoff';
begin
    if concat_ws(' ', p_policy -> 'timeout_policy' ->> 'attempt_timeout_ms', p_policy ->> 'max_reclaim_count',
                 p_policy ->> 'max_replay_count', p_policy -> 'stream_policy' ->> 'retention_ttl_ms',
                 p_policy -> 'suspension_policy' ->> 'default_timeout_ms',
                 p_policy -> 'suspension_policy' ->> 'max_signals_per_execution',
                 v_retry ->> 'max_retries', v_backoff ->> 'delay_ms') !~ '^([0-9]{1,14}( |$))*$'
       or concat_ws(' ', v_backoff ->> 'initial_delay_ms', v_backoff ->> 'max_delay_ms', v_backoff ->> 'multiplier')
          !~ '^([0-9]{1,14}(\.[0-9]{1,30})?( |$))*$'
       or coalesce(v_backoff ->> 'jitter', 'true') not in ('true', 'false')
       or coalesce(json_typeof(v_retry -> 'retryable_categories'), 'array') <> 'array' then
        raise exception 'a number of the policy is not between 0 and 10^14, or another value is not of its type'
            using errcode = 'invalid_parameter_value';
    end if;
end;
$$;
