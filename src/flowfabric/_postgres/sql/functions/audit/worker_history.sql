-- audit_worker_history: A worker registers, and then disappears once: it is marked dead or swept; until then it is registered.
create or replace function flowfabric.audit_worker_history(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with told as (
        select w.namespace, w.worker_instance_id, w.seq, w.occurred_at,
               case when w.event <> 'registered' then 'end' when w.reason is null then 'begin' else 'refresh' end as what
        from flowfabric.worker_event w where w.event <> 'heartbeat'
    ), h as (
        select t.*, lag(t.what) over w as before, lead(t.what) over w is null as is_last
        from told t window w as (partition by t.namespace, t.worker_instance_id order by t.seq)
    )
    select 'worker_history', null::integer, null::uuid, h.worker_instance_id || ': ' || h.before || ', then ' || h.what
    from h where (h.what = 'begin') <> (h.before = 'end')
    union all
    select 'worker_history', null::integer, null::uuid,
           h.worker_instance_id || ': ' || h.what || ', and ' || case when r.namespace is null then 'absent' else 'there' end
    from h left join flowfabric.registration r
      on r.namespace = h.namespace and r.worker_instance_id = h.worker_instance_id
    where h.is_last and (h.what = 'end') <> (r.namespace is null)
$$;
