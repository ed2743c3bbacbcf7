-- may_operate: whether the user of this session may act for any lease holder
--
-- The id of a lease is the right to report for its holder: reads return it only to a user who needs no such right, and null
-- to the others. A user who changed to another role is judged by the one that connected.
create or replace function flowfabric.may_operate() returns boolean
language sql stable as $$
    select has_function_privilege(
        session_user, 'flowfabric.complete_as_operator(integer, uuid, bytea, text)', 'execute')
$$;
