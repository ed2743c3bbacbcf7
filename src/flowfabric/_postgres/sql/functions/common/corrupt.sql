-- corrupt: raise, which rolls the call back.
create or replace function flowfabric.corrupt(p_message text) returns boolean
language plpgsql as $$
begin
    raise exception '%', p_message using errcode = 'FF004';
end;
$$;
