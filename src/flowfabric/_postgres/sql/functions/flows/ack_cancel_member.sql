-- ack_cancel_member: a member no longer has to be cancelled; the last one removes the backlog.
--
-- Roles    operate
create or replace function flowfabric.ack_cancel_member(p_partition integer, p_flow uuid, p_id uuid) returns void
language plpgsql security definer as $$
begin
    perform flowfabric.require_read_committed();
    perform 1 from flowfabric.cancel_backlog b where b.partition = p_partition and b.flow_id = p_flow for update;
    delete from flowfabric.cancel_member m where m.partition = p_partition and m.id = p_id and m.flow_id = p_flow;
    delete from flowfabric.cancel_backlog b
    where b.partition = p_partition and b.flow_id = p_flow and not exists (
        select from flowfabric.cancel_member m where m.partition = p_partition and m.flow_id = p_flow);
end;
$$;
