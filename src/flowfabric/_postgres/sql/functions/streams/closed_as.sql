-- closed_as: why the stream of an attempt is closed, from the attempt's record; null: it is open.
--
-- The first close counts: a lost lease closes a stream, whatever ends the execution later. Only a reclaim changes the word.
create or replace function flowfabric.closed_as(
    p_disposition text, p_lost text, p_failure_reason text, p_failure_category text) returns text
language sql immutable as $$
    select case
        when p_disposition = 'reclaimed' then 'reclaimed'
        when p_lost is not null then 'lease_' || p_lost
        when p_disposition is null then null
        when p_disposition = 'completed' then 'attempt_success'
        when p_disposition = 'skipped' then 'dependency_impossible'
        when p_failure_category = 'timeout' and p_failure_reason like 'suspension\_timeout:%' then 'suspension_timeout'
        when p_disposition = 'cancelled' then 'attempt_cancelled'
        when p_disposition = 'expired' then 'expired'
        when p_failure_category = 'timeout' and p_failure_reason = 'attempt_timeout' then 'expired'
        else 'attempt_failure' end
$$;
