-- audit_grant_hides: Only a live grant hides a ready row.
create or replace function flowfabric.audit_grant_hides(
    p_low integer, p_high integer, p_from uuid, p_to uuid, p_now timestamptz) returns setof flowfabric.violation
language sql stable as $$
    select 'grant_hides', r.partition, r.id, null from flowfabric.ready r
    where r.partition between p_low and p_high and r.granted_until > p_now
      and not exists (select from flowfabric.claim_grant g where g.partition = r.partition and g.id = r.id
                      and g.expires_at = r.granted_until)
$$;
