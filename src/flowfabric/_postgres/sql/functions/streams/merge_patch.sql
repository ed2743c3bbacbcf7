-- merge_patch: a document with a JSON merge patch (RFC 7396) applied; both are objects.
--
-- A null member deletes a key. Where the text __ff_null__ is a value, even in an array, the document has a null.
create or replace function flowfabric.merge_patch(p_document jsonb, p_patch jsonb) returns jsonb
language plpgsql immutable as $$
declare
    v_document jsonb := case when jsonb_typeof(p_document) = 'object' then p_document else '{}' end;
    v_gone text[];
    v_set jsonb;
begin
    select coalesce(array_agg(m.key) filter (where m.value = 'null'), '{}'),
           coalesce(jsonb_object_agg(m.key, case jsonb_typeof(m.value)
                        when 'object' then flowfabric.merge_patch(v_document -> m.key, m.value)
                        else flowfabric.without_sentinels(m.value) end) filter (where m.value <> 'null'), '{}')
    into v_gone, v_set
    from jsonb_each(p_patch) m;
    return (v_document - v_gone) || v_set;
end;
$$;

-- without_sentinels: a value with null wherever the text __ff_null__ was a value.
create or replace function flowfabric.without_sentinels(p_value jsonb) returns jsonb
language plpgsql immutable as $$
begin
    if strpos(p_value::text, '"__ff_null__"') = 0 then
        return p_value;
    end if;
    return case jsonb_typeof(p_value)
        when 'string' then case p_value when '"__ff_null__"' then 'null'::jsonb else p_value end
        when 'array' then (select jsonb_agg(flowfabric.without_sentinels(a.value) order by a.o)
                           from jsonb_array_elements(p_value) with ordinality as a (value, o))
        when 'object' then (select jsonb_object_agg(m.key, flowfabric.without_sentinels(m.value)) from jsonb_each(p_value) m)
        else p_value end;
end;
$$;

-- parse_patch: the patch that the bytes of a delta are, or why they are none: patch, patch_depth_exceeded.
--
-- Objects may be nested 16 deep. Containers of any sort 64 deep: each level is a call of its own.
create or replace function flowfabric.parse_patch(p_payload bytea, out patch jsonb, out problem text)
language plpgsql immutable as $$
declare
    v_text text;
begin
    begin
        v_text := convert_from(p_payload, 'UTF8');
        patch := v_text::jsonb;
    exception when others then
        problem := 'patch';
        return;
    end;
    if jsonb_typeof(patch) <> 'object' then
        problem := 'patch';
    elsif length(v_text) - length(translate(v_text, '{[', '')) > 17
          and exists (with recursive w as (
                          select parse_patch.patch as v, 0 as objects, 0 as depth
                          union all
                          select c.value, w.objects + case jsonb_typeof(c.value) when 'object' then 1 else 0 end, w.depth + 1
                          from w
                          cross join lateral (
                              select m.value from jsonb_each(case jsonb_typeof(w.v) when 'object' then w.v else '{}' end) m
                              union all
                              select a.value from jsonb_array_elements(case jsonb_typeof(w.v) when 'array' then w.v else '[]' end) a) c
                          where jsonb_typeof(c.value) in ('object', 'array') and w.objects <= 16 and w.depth <= 64)
                      select from w where w.objects > 16 or w.depth > 64) then
        problem := 'patch_depth_exceeded';
    end if;
    if problem is not null then
        patch := null;
    end if;
end;
$$;
