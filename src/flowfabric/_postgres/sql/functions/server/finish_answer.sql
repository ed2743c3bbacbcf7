-- finish_answer: store the answer to a request that began with begin_answer, in the transaction of what it did
--
-- Takes    p_status null: the answer has a secret, and only that there was one is stored.
-- Returns  false if another request has taken its place: the transaction must roll back.
-- Roles    operate
create or replace function flowfabric.finish_answer(
    p_key text, p_operation text, p_idempotency_key text, p_holder uuid, p_status integer, p_headers text, p_body bytea)
returns boolean
language plpgsql security definer as $$
begin
    update flowfabric.kept_answer k
    set held_until = null, status = p_status, headers = p_headers, body = p_body
    where k.key_id = p_key and k.operation = p_operation and k.idempotency_key = p_idempotency_key
      and k.holder = p_holder and k.held_until is not null;
    return found;
end;
$$;
