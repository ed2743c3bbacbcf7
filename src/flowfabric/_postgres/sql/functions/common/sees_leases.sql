-- sees_leases: whether the user of this session sees the ids of leases
--
-- The id of a lease is the right to report for its holder, so that only a user who may report for any holder sees it; for
-- the others, reads return null. A user who changed to another role is judged by the one that connected.
create or replace function flowfabric.sees_leases() returns boolean
language sql stable as $$
    select has_function_privilege(
        session_user, 'flowfabric.complete_as_operator(integer, uuid, bytea, text)', 'execute')
$$;
