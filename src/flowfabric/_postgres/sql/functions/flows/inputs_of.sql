-- inputs_of: the results that upstreams pass to an execution: one instead of its input, and others beside it.
--
-- To an all_settled join, upstreams that did not succeed pass their state, with the reason as result and the category as
-- encoding.
create or replace function flowfabric.inputs_of(p_partition integer, p_id uuid) returns flowfabric.inputs
language plpgsql stable as $$
declare
    v flowfabric.inputs;
begin
    select i.payload, i.encoding into v.payload, v.encoding from flowfabric.injected_input i
    where i.partition = p_partition and i.id = p_id;
    -- Successes (of all_settled: ends), but not those after the group was decided: every attempt receives the same
    -- results, even while an upstream is being replayed.
    select case when count(*) > 0 then coalesce(array_agg(up.id) filter (where d.counts), '{}') end,
           array_agg(case when not d.is_kept then up.state when d.outcome = 'success' then 'completed' else d.outcome end)
               filter (where d.counts),
           array_agg(case when d.is_kept then d.result when d.outcome = 'success' then up.result
                          else flowfabric.reason_bytes(up.failure_reason, up.cancellation_reason) end) filter (where d.counts),
           array_agg(case when d.is_kept then d.encoding when d.outcome = 'success' then up.result_encoding
                          else up.failure_category end) filter (where d.counts)
    into v.upstreams, v.states, v.results, v.encodings
    from (select distinct on (x.upstream) x.upstream, x.outcome, c.counts, x.is_kept, x.kept_result as result,
                 x.kept_encoding as encoding
          from flowfabric.edge x
          cross join lateral (select x.is_in_time and x.outcome is not null and (x.outcome = 'success' or exists (
              select from flowfabric.edge_group g where g.partition = x.partition and g.flow_id = x.flow_id
                and g.downstream = x.downstream and g.policy = 'all_settled')) as counts) c
          where x.partition = p_partition and x.downstream = p_id and x.passes
          order by x.upstream, c.counts desc) d
    join flowfabric.execution up on up.partition = p_partition and up.id = d.upstream;
    return v;
end;
$$;
