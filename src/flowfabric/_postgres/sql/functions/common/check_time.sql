-- check_time: refuse a time that not every reader can hold
--
-- Keeps users who may call the functions from storing values that would make the calls of others fail later. The engine
-- checks everything in detail before it sends it; this check is for other callers.
create or replace function flowfabric.check_time(p_at timestamptz) returns void
language plpgsql immutable as $$
begin
    if p_at <= '0001-01-01 UTC' or p_at >= '9999-12-31 23:59:59.999999 UTC' then   -- infinities too
        raise exception 'a time is not within the years 1 to 9999' using errcode = 'invalid_parameter_value';
    end if;
end;
$$;
