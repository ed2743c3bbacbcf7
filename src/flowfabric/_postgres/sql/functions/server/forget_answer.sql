-- forget_answer: forget a request that began with begin_answer: it did nothing that a repeat would do twice
--
-- Roles    operate
create or replace function flowfabric.forget_answer(p_key text, p_operation text, p_idempotency_key text, p_holder uuid)
returns boolean
language plpgsql security definer as $$
begin
    delete from flowfabric.kept_answer k
    where k.key_id = p_key and k.operation = p_operation and k.idempotency_key = p_idempotency_key
      and k.holder = p_holder and k.held_until is not null;
    return found;
end;
$$;
