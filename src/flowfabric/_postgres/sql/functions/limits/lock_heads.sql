-- lock_heads: lock policies with their keys, given in order, creating the rows of new ones.
--
-- Takes    p_mode: wait; skip: leave out what is locked; share: wait, together with others that share.
-- Returns  per policy and key: whether it is locked now.
create or replace function flowfabric.lock_heads(p_policies uuid[], p_keys text[], p_mode text) returns boolean[]
language plpgsql as $$
declare
    v_locked text[];
begin
    -- New ones are created before any other is locked: a call that has locked one never waits for a creation.
    if p_mode <> 'skip' and exists (
            select from unnest(p_policies, p_keys) as u (policy_id, key)
            where not exists (select from flowfabric.quota_head h where h.policy_id = u.policy_id and h.key = u.key)) then
        perform flowfabric.create_heads(p_policies, p_keys, true);
    end if;
    if p_mode = 'wait' then
        select array_agg(flowfabric.head_name(x.policy_id, x.key)) into v_locked
        from (select h.policy_id, h.key from unnest(p_policies, p_keys) as u (policy_id, key)
              cross join lateral (select y.ctid as tid from flowfabric.quota_head y
                                  where y.policy_id = u.policy_id and y.key = u.key offset 0) f
              join flowfabric.quota_head h on h.ctid = f.tid   -- in the order given
              for no key update of h) x;
    elsif p_mode = 'share' then
        select array_agg(flowfabric.head_name(x.policy_id, x.key)) into v_locked
        from (select h.policy_id, h.key from unnest(p_policies, p_keys) as u (policy_id, key)
              cross join lateral (select y.ctid as tid from flowfabric.quota_head y
                                  where y.policy_id = u.policy_id and y.key = u.key offset 0) f
              join flowfabric.quota_head h on h.ctid = f.tid
              for share of h) x;
    end if;
    if coalesce(cardinality(v_locked), 0) < cardinality(p_policies) then   -- the reconciler may just have removed one
        for v_try in 1 .. 2 loop
            select array_agg(flowfabric.head_name(x.policy_id, x.key)) into v_locked
            from (select h.policy_id, h.key from unnest(p_policies, p_keys) as u (policy_id, key)
                  cross join lateral (select y.ctid as tid from flowfabric.quota_head y
                                      where y.policy_id = u.policy_id and y.key = u.key offset 0) f
                  join flowfabric.quota_head h on h.ctid = f.tid
                  for no key update of h skip locked) x;
            exit when coalesce(cardinality(v_locked), 0) = cardinality(p_policies) or v_try = 2
                or not flowfabric.create_heads(p_policies, p_keys, false);
        end loop;
    end if;
    return array(select coalesce(flowfabric.head_name(u.policy_id, u.key) = any (v_locked), false)
                 from unnest(p_policies, p_keys) with ordinality as u (policy_id, key, ord) order by u.ord);
end;
$$;

-- create_heads: the rows of new policies and keys, each by one transaction at a time: a second one that inserted it too
-- would wait, in any order. Returns whether any was new.
create or replace function flowfabric.create_heads(p_policies uuid[], p_keys text[], p_wait boolean) returns boolean
language plpgsql as $$
begin
    insert into flowfabric.quota_head (policy_id, key)
    select u.policy_id, u.key from unnest(p_policies, p_keys) as u (policy_id, key)
    where not exists (select from flowfabric.quota_head h where h.policy_id = u.policy_id and h.key = u.key)
      and case when p_wait then pg_advisory_xact_lock(flowfabric.head_lock(u.policy_id, u.key)) is not null
               else pg_try_advisory_xact_lock(flowfabric.head_lock(u.policy_id, u.key)) end
    on conflict do nothing;
    return found;
end;
$$;

-- head_name: a policy and key as one text.
create or replace function flowfabric.head_name(p_policy uuid, p_key text) returns text
language sql immutable as $$ select p_policy || ' ' || p_key $$;

-- head_lock: the advisory lock of those who create the row of a policy and key.
create or replace function flowfabric.head_lock(p_policy uuid, p_key text) returns bigint
language sql immutable as $$ select hashtextextended(flowfabric.head_name(p_policy, p_key), 1179795788) $$;

-- share_heads: lock policies with their keys together with other claims, while each has at least p_far free slots.
--
-- Called by claims of one execution, which take one slot each. A head that came nearer to its cap while this call waited is
-- given back (the block is rolled back): transactions that share it must not wait for each other.
-- Returns  their rooms under the locks; null: nothing is locked.
create or replace function flowfabric.share_heads(p_policies uuid[], p_keys text[], p_far bigint)
returns flowfabric.quota_room[]
language plpgsql as $$
declare
    v_rooms flowfabric.quota_room[];
begin
    if false = any (flowfabric.lock_heads(p_policies, p_keys, 'share')) then
        raise sqlstate 'FF001';
    end if;
    v_rooms := array(select r from flowfabric.quota_rooms(p_policies, p_keys, p_far, false, flowfabric.now()) as r);
    if exists (select from unnest(v_rooms) as r where r.slots_left < p_far) then
        raise sqlstate 'FF001';
    end if;
    return v_rooms;
exception when sqlstate 'FF001' then
    return null;
end;
$$;
