-- write_operator_audit: a row of the audit log
--
-- Called in the transaction of the change that it records. Events that the transaction writes carry the actor if it set
-- flowfabric.actor, for itself alone, before.
-- Roles    operate
create or replace function flowfabric.write_operator_audit(
    p_actor text, p_key text, p_address text, p_operation text, p_target text, p_outcome text, p_request text)
returns bigint
language sql volatile security definer as $$
    insert into flowfabric.operator_audit (at, actor, key_id, address, operation, target, outcome, request_id)
    values (flowfabric.now(), p_actor, p_key, p_address, p_operation, p_target, p_outcome, p_request)
    returning seq
$$;
