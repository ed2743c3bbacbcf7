-- register_service: the number of what a worker serves; p_kinds null means every kind.
--
-- Takes    p_versions: a version of each kind, null for none; a kind with several is given several times, the one in which
--          executions begin first. p_digests: of the handler of each kind. As a whole null if no kind has one.
-- Roles    work, operate
create or replace function flowfabric.register_service(
    p_kinds text[], p_versions integer[], p_digests text[], p_capabilities text[])
returns integer
language plpgsql security definer as $$
declare
    v_digest text := md5(array[coalesce(p_kinds::text, ''), coalesce(p_versions::text, ''), coalesce(p_digests::text, ''),
                              p_capabilities::text]::text);
    v_id integer;
begin
    select s.id into v_id from flowfabric.service s where s.digest = v_digest;
    if not found then
        insert into flowfabric.service (kinds, versions, digests, capabilities, digest)
        values (p_kinds, p_versions, p_digests, p_capabilities, v_digest)
        on conflict (digest) do nothing;
        select s.id into v_id from flowfabric.service s where s.digest = v_digest;
    end if;
    return v_id;
end;
$$;
