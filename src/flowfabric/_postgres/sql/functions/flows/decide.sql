-- Edge groups: counting the ends of upstreams. Only resolve_edges resolves edges.

-- decide: the state of a group by its policy. A decided any_of or quorum keeps its first decision; impossible is final;
-- all_settled only waits for ends, and is never impossible.
create or replace function flowfabric.decide(
    p_policy text, p_k integer, p_n integer, p_succeeded integer, p_lost integer, p_before text) returns text
language sql immutable as $$
    select case
        when p_before = 'impossible' or (p_before = 'satisfied' and p_policy in ('any_of', 'quorum')) then p_before
        when p_policy = 'all_of' then
            case when p_lost > 0 then 'impossible' when p_n > 0 and p_succeeded = p_n then 'satisfied' else 'pending' end
        when p_policy = 'all_settled' then
            case when p_n > 0 and p_succeeded + p_lost = p_n then 'satisfied' else 'pending' end
        when p_succeeded >= p_k then 'satisfied'
        when p_n >= p_k and p_lost > p_n - p_k then 'impossible'
        else 'pending' end
$$;
