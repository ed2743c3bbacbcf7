-- time_text: a time as people read it in blocking_detail: UTC, to the millisecond.
create or replace function flowfabric.time_text(p_at timestamptz) returns text
language sql stable as $$ select to_char(p_at at time zone 'utc', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"') $$;
