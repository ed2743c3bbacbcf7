-- take_lead: lead groups of duties, or learn for how long others do
--
-- A lease in a row: it passes every pooler, ends with a cut network, and no role without the right to call this can take
-- it. Two leaders at a time do no harm: every duty may be run by any number of processes. At most for a minute at a time;
-- a lease that seems longer has expired: the clock was set back.
-- A leader also checks whether another server writes the event log now (begin_epoch).
-- Returns  per group: whether this process leads it, and the milliseconds after which to call again.
-- Roles    work, operate
create or replace function flowfabric.take_lead(p_names text[], p_instance uuid, p_ms bigint)
returns table (name text, is_ours boolean, left_ms double precision)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_until timestamptz;
    v_instance uuid;
    v_leads boolean := false;
begin
    perform flowfabric.require_read_committed();
    foreach name in array p_names loop
        select l.until, l.instance into v_until, v_instance from flowfabric.lead l where l.name = take_lead.name;
        if not found or v_instance = p_instance or v_until < clock_timestamp()
           or v_until > clock_timestamp() + interval '1 minute' then
            insert into flowfabric.lead as l (name, instance, until)
            values (take_lead.name, p_instance, clock_timestamp() + least(flowfabric.ms(p_ms), interval '1 minute'))
            on conflict (name) do update set instance = excluded.instance, until = excluded.until
            where l.instance = excluded.instance or l.until < clock_timestamp()
               or l.until > clock_timestamp() + interval '1 minute';
            select l.until, l.instance into v_until, v_instance from flowfabric.lead l where l.name = take_lead.name;
        end if;
        is_ours := v_instance = p_instance;
        left_ms := greatest(extract(epoch from v_until - clock_timestamp()) * 1000, 0);
        v_leads := v_leads or is_ours;
        return next;
    end loop;
    if v_leads then
        perform flowfabric.begin_epoch();
    end if;
end;
$$;
