-- outcome_of: the outcome of an upstream for its final state.
create or replace function flowfabric.outcome_of(p_state text) returns text
language sql immutable as $$ select case p_state when 'completed' then 'success' else p_state end $$;
