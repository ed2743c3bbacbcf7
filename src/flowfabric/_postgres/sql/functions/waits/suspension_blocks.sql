-- suspension_blocks: the blocking reason that a reason code leads to.
create or replace function flowfabric.suspension_blocks(p_reason text) returns text
language sql immutable as $$
    select case p_reason when 'step_boundary' then 'waiting_for_signal'
                         when 'waiting_for_operator_review' then 'paused_by_operator'
                         when 'manual_pause' then 'paused_by_operator'
                         when 'paused_by_budget' then 'waiting_for_budget' else p_reason end
$$;
