-- create_quota_policy: store a policy; one that exists is left as it is
--
-- Returns  created, exists, or name_taken: another policy has the name.
-- Roles    work, operate
create or replace function flowfabric.create_quota_policy(
    p_id uuid, p_name text, p_key text, p_window_seconds bigint, p_max_requests bigint, p_max_concurrent bigint,
    p_jitter_ms bigint)
returns text
language plpgsql security definer as $$
declare
    v_now timestamptz := flowfabric.now();
begin
    perform flowfabric.require_read_committed();
    perform flowfabric.check_quota(p_name, p_key, p_window_seconds, p_max_requests, p_max_concurrent, p_jitter_ms);
    insert into flowfabric.quota_policy
        (id, name, key, window_seconds, max_requests, max_concurrent, jitter_ms, created_at, updated_at)
    values (p_id, p_name, p_key, p_window_seconds, p_max_requests, p_max_concurrent, p_jitter_ms, v_now, v_now)
    on conflict do nothing;
    return case when found then 'created'
                when exists (select from flowfabric.quota_policy p where p.id = p_id) then 'exists'
                else 'name_taken' end;
end;
$$;

-- check_quota: refuse numbers and texts that other calls could not use. The engine checks them in detail.
create or replace function flowfabric.check_quota(
    p_name text, p_key text, p_window_seconds bigint, p_max_requests bigint, p_max_concurrent bigint, p_jitter_ms bigint)
returns void
language plpgsql immutable as $$
begin
    if (p_window_seconds between 0 and 31622400 and p_max_requests between 0 and 1000000000
        and p_max_concurrent between 0 and 1000000000 and p_jitter_ms between 0 and 86400000) is not true
       or octet_length(p_name) not between 1 and 256 or octet_length(p_key) not between 1 and 256 then
        raise exception 'a number or text of the quota policy is out of bounds' using errcode = 'invalid_parameter_value';
    end if;
end;
$$;
