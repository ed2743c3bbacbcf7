-- open_flow: lock a flow for a change; returns why it may not change, or null.
create or replace function flowfabric.open_flow(p_partition integer, p_flow uuid, p_grows boolean) returns text
language plpgsql as $$
declare
    v_state text;
begin
    if p_grows then
        select f.state into v_state from flowfabric.flow f where f.partition = p_partition and f.flow_id = p_flow
        for no key update;
    else
        select f.state into v_state from flowfabric.flow f where f.partition = p_partition and f.flow_id = p_flow for share;
    end if;
    return case when v_state is null then 'flow_not_found' when v_state <> 'open' then 'flow_already_terminal' end;
end;
$$;
