-- has_cycle: whether edges, as pairs of node numbers from 1 to p_nodes, contain a cycle
--
-- Called by closes_cycle when many edges are staged together, and by the audit. Kahn's algorithm with linked lists in
-- arrays, so that each edge is visited once: a recursive query visits an edge once per path that leads to it, and a
-- graph of a few layers has more paths than fit into memory.
create or replace function flowfabric.has_cycle(p_from integer[], p_to integer[], p_nodes integer) returns boolean
language plpgsql immutable as $$
declare
    v_waits integer[] := array_fill(0, array[p_nodes]);    -- unseen edges into each node
    v_first integer[] := array_fill(0, array[p_nodes]);    -- the first edge out of each node
    v_next integer[] := array_fill(0, array[greatest(cardinality(p_from), 1)]);   -- the next edge of the same node
    v_stack integer[] := array_fill(0, array[p_nodes]);
    v_top integer := 0;
    v_seen integer := 0;
    v_node integer;
    v_edge integer;
begin
    for i in 1 .. cardinality(p_from) loop
        v_waits[p_to[i]] := v_waits[p_to[i]] + 1;
        v_next[i] := v_first[p_from[i]];
        v_first[p_from[i]] := i;
    end loop;
    for i in 1 .. p_nodes loop
        if v_waits[i] = 0 then
            v_top := v_top + 1; v_stack[v_top] := i;
        end if;
    end loop;
    while v_top > 0 loop
        v_node := v_stack[v_top]; v_top := v_top - 1; v_seen := v_seen + 1;
        v_edge := v_first[v_node];
        while v_edge > 0 loop
            v_waits[p_to[v_edge]] := v_waits[p_to[v_edge]] - 1;
            if v_waits[p_to[v_edge]] = 0 then
                v_top := v_top + 1; v_stack[v_top] := p_to[v_edge];
            end if;
            v_edge := v_next[v_edge];
        end loop;
    end loop;
    return v_seen < p_nodes;
end;
$$;
