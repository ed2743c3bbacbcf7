-- leave_lead: give up what this process leads.
--
-- Roles    work, operate
create or replace function flowfabric.leave_lead(p_instance uuid) returns void
language sql volatile security definer as $$
    delete from flowfabric.lead l where l.instance = p_instance
$$;
