-- retry_delay_ms: the retry decision and its backoff; null means the failure is final.
--
-- Takes    the effective retry policy (null: none), the retries so far, and the failure's class and category.
create or replace function flowfabric.retry_delay_ms(p_policy jsonb, p_retries integer, p_class text, p_category text)
returns bigint
language plpgsql volatile as $$
declare
    v_backoff jsonb;
    v_delay double precision;
    v_max double precision;
begin
    if p_class in ('permanent', 'cancelled')
       or p_policy is null
       or (jsonb_array_length(coalesce(p_policy -> 'retryable_categories', '[]')) > 0
           and not coalesce(p_policy -> 'retryable_categories' ? p_category, false))
       or p_retries >= coalesce((p_policy ->> 'max_retries')::bigint, 3) then
        return null;
    end if;
    v_backoff := coalesce(p_policy -> 'backoff', '{"type": "exponential"}');
    case v_backoff ->> 'type'
        when 'exponential' then
            v_max := coalesce((v_backoff ->> 'max_delay_ms')::double precision, 60000);
            begin
                v_delay := coalesce((v_backoff ->> 'initial_delay_ms')::double precision, 1000)
                           * power(coalesce((v_backoff ->> 'multiplier')::double precision, 2), p_retries);
            exception when numeric_value_out_of_range then
                v_delay := case when (v_backoff ->> 'multiplier')::double precision < 1 then 0 else v_max end;
            end;
            v_delay := floor(least(v_delay, v_max));
            if coalesce((v_backoff ->> 'jitter')::boolean, false) then
                v_delay := ceil(v_delay / 2) + floor(random() * (v_delay - ceil(v_delay / 2) + 1));
            end if;
            return v_delay::bigint;
        when 'fixed' then
            return coalesce((v_backoff ->> 'delay_ms')::bigint, 1000);
        else
            return 1000;
    end case;
end;
$$;
