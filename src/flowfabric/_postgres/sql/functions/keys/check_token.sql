-- check_token: what is wrong with a token, or null.
--
-- Takes no lock and reads only rows that never change. Every unknown token gets the same result after the same work: a
-- digest is always computed and compared, with a random key if there is none.
create or replace function flowfabric.check_token(p_partition integer, p_id uuid, p_waitpoint uuid, p_token text)
returns text
language plpgsql stable as $$
begin
    return (
        select case when coalesce(p_token, '') = '' then 'missing_token'
                    when not t.is_known or not t.is_same then 'invalid_token'
                    when t.state = 'current' or (t.state = 'verifying' and t.expires_at >= flowfabric.now()) then null
                    else 'token_expired' end
        from (select d.state, d.expires_at, flowfabric.same_bytes(d.given, d.expected) as is_same,
                     d.is_key and exists (
                         select from flowfabric.waitpoint w where w.partition = p_partition
                         and w.waitpoint_id = p_waitpoint and w.id = p_id and w.token_kid = d.kid) as is_known
              from (select g.kid, k.state, k.expires_at, k.inner_key is not null as is_key,
                           convert_to(g.digest, 'UTF8') as given,
                           convert_to(encode(flowfabric.hmac(
                               coalesce(k.inner_key, decode(repeat('36', 64), 'hex')),
                               coalesce(k.outer_key, decode(repeat('5c', 64), 'hex')),
                               convert_to(g.kid || ':{fp:' || p_partition || '}:' || p_id || ':' || p_waitpoint, 'UTF8')),
                               'hex'), 'UTF8') as expected
                    from (select split_part(p_token, ':', 1) as kid, substr(p_token, strpos(p_token, ':') + 1) as digest) g
                    left join flowfabric.keystore k on k.kid = g.kid
                    offset 0) d   -- the fences: everything is computed, whatever is wrong
              offset 0) t);
end;
$$;
