-- inputs_of: the results that upstreams pass to an execution: one instead of its input, and others beside it.
create or replace function flowfabric.inputs_of(p_partition integer, p_id uuid) returns flowfabric.inputs
language plpgsql stable as $$
declare
    v flowfabric.inputs;
begin
    select i.payload, i.encoding into v.payload, v.encoding from flowfabric.injected_input i
    where i.partition = p_partition and i.id = p_id;
    -- Successes, but not those after the group was decided: every attempt receives the same results, also while an
    -- upstream is being replayed.
    select case when count(*) > 0 then coalesce(array_agg(up.id) filter (where d.counts), '{}') end,
           array_agg(case when d.is_kept then 'completed' else up.state end) filter (where d.counts),
           array_agg(case when d.is_kept then d.result else up.result end) filter (where d.counts),
           array_agg(case when d.is_kept then d.encoding else up.result_encoding end) filter (where d.counts)
    into v.upstreams, v.states, v.results, v.encodings
    from (select distinct on (x.upstream) x.upstream, coalesce(x.outcome = 'success' and x.is_in_time, false) as counts,
                 x.is_kept, x.kept_result as result, x.kept_encoding as encoding
          from flowfabric.edge x
          where x.partition = p_partition and x.downstream = p_id and x.passes
          order by x.upstream, coalesce(x.outcome = 'success' and x.is_in_time, false) desc) d
    join flowfabric.execution up on up.partition = p_partition and up.id = d.upstream;
    return v;
end;
$$;
