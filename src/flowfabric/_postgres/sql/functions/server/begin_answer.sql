-- begin_answer: announce a request with an idempotency key, or find the answer to an earlier one
--
-- Committed before the request is worked on: a repeat that comes meanwhile is refused instead of waiting. A request counts
-- as under way for p_hold_ms; after that a repeat takes its place, and its end is refused (finish_answer), so that its
-- transaction rolls back.
-- Returns  new; under_way; other_request: the key was used for something else; or done, with the answer. Done without a
--          status: the answer had a secret and was not stored.
-- Roles    operate
create or replace function flowfabric.begin_answer(
    p_key text, p_operation text, p_idempotency_key text, p_request bytea, p_holder uuid, p_hold_ms bigint, p_keep_ms bigint)
returns table (code text, status integer, headers text, body bytea)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    a flowfabric.kept_answer;
begin
    perform flowfabric.require_read_committed();
    insert into flowfabric.kept_answer (key_id, operation, idempotency_key, request, holder, held_until, expires_at)
    select p_key, p_operation, p_idempotency_key, p_request, p_holder, n.at + flowfabric.ms(p_hold_ms), n.at + flowfabric.ms(p_keep_ms)
    from (select flowfabric.now() as at) n
    on conflict do nothing;
    if found then
        code := 'new';
        return next;
        return;
    end if;
    select k.* into a from flowfabric.kept_answer k
    where k.key_id = p_key and k.operation = p_operation and k.idempotency_key = p_idempotency_key for update;
    v_now := flowfabric.now();
    if a.holder is null then
        code := 'under_way';   -- it was forgotten this moment: the next try finds nothing
    elsif a.expires_at <= v_now or (a.request = p_request and a.held_until <= v_now) then
        code := 'new';
        update flowfabric.kept_answer k
        set request = p_request, holder = p_holder, held_until = v_now + flowfabric.ms(p_hold_ms), status = null, headers = null,
            body = null, expires_at = v_now + flowfabric.ms(p_keep_ms)
        where k.key_id = p_key and k.operation = p_operation and k.idempotency_key = p_idempotency_key;
    elsif a.request <> p_request then
        code := 'other_request';
    elsif a.held_until is not null then
        code := 'under_way';
    else
        code := 'done'; status := a.status; headers := a.headers; body := a.body;
    end if;
    return next;
end;
$$;
