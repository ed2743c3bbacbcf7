-- purge_keys: erase the secrets past their grace; returns how many. The names stay, so that none is used twice.
create or replace function flowfabric.purge_keys(p_now timestamptz) returns integer
language plpgsql as $$
declare
    v_n integer;
begin
    update flowfabric.keystore k set state = 'retired', inner_key = null, outer_key = null, expires_at = null
    where k.state = 'verifying' and k.expires_at < p_now;
    get diagnostics v_n = row_count;
    return v_n;
end;
$$;
