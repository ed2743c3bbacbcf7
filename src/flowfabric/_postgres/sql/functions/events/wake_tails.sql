-- wake_tails: notify the processes that wait for frames of these executions: there are some, or an attempt ended.
--
-- Called as the last step under the locks of the executions.
create or replace function flowfabric.wake_tails(p_partition integer[], p_id uuid[]) returns void
language plpgsql as $$
begin
    -- By id, as in end_executions.
    if exists (select from unnest(p_partition, p_id) as u (partition, id)
               cross join lateral (select from flowfabric.watch w
                                   where w.partition = u.partition and w.id = u.id and w.topic = 'frames' offset 0) w) then
        perform flowfabric.tell_watchers(p_partition, p_id, 'frames');
    end if;
end;
$$;
