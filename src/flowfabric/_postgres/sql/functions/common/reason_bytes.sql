-- reason_bytes: why an execution did not succeed, as an all_settled join receives it.
create or replace function flowfabric.reason_bytes(p_failure text, p_cancellation text) returns bytea
language sql stable as $$ select convert_to(coalesce(p_failure, p_cancellation, ''), 'UTF8') $$;
