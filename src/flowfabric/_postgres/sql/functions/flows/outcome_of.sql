-- outcome_of: how an ended execution's state is called where it is an upstream.
create or replace function flowfabric.outcome_of(p_state text) returns text
language sql immutable as $$ select case p_state when 'completed' then 'success' else p_state end $$;
