-- The summary document of an attempt: a stored document, and the deltas since. A delta is stored as a frame and merged
-- later: every 32 deltas, or when the document could become too large; so most deltas write only themselves.

-- merge_deltas: decide about the summary deltas of one call for one stream, in their order, and store the document when
-- it is time.
--
-- Called under the lock of the execution, before the deltas are stored as frames.
-- Takes    p_ms: their milliseconds.
-- Returns  the head with the deltas counted, and per delta null or why it is refused: code and detail.
create or replace function flowfabric.merge_deltas(
    p_head flowfabric.stream_head, p_payloads bytea[], p_ms bigint,
    out head flowfabric.stream_head, out codes text[], out details text[])
language plpgsql as $$
declare
    v_most constant integer := 1048576;
    v_document jsonb;                -- null: not needed so far
    v_patches jsonb[] := '{}';       -- accepted, and not merged into it
    v_patch jsonb;
    v_problem text;
    v_size integer;
    v_folds boolean := false;
    v_before integer := p_head.version;
begin
    head := p_head;
    head.folded := coalesce(head.folded, 0);
    head.bound := coalesce(head.bound, 2);
    for i in 1 .. cardinality(p_payloads) loop
        codes[i] := null; details[i] := null;
        select p.patch, p.problem into v_patch, v_problem from flowfabric.parse_patch(p_payloads[i]) p;
        if v_problem is not null then
            codes[i] := 'invalid_input'; details[i] := v_problem;
            continue;
        end if;
        v_size := octet_length(v_patch::text);
        if head.bound + v_size > v_most then
            v_document := flowfabric.merge_all(coalesce(v_document, flowfabric.document_of(head.partition, head.id, head.attempt_index)), v_patches);
            v_patches := '{}';
            v_patch := flowfabric.merge_patch(v_document, v_patch);
            v_size := octet_length(v_patch::text);
            if v_size > v_most then
                codes[i] := 'retention_limit_exceeded'; details[i] := format('the summary document would have %s bytes; allowed: %s; keep large texts elsewhere, or delete keys with None', v_size, v_most);
                continue;
            end if;
            v_document := v_patch;
            head.bound := v_size;
            v_folds := true;
        else
            head.bound := head.bound + v_size;
            v_patches := array_append(v_patches, v_patch);
        end if;
        head.version := head.version + 1;
    end loop;
    if v_folds or head.version - head.folded >= 32 then
        v_document := flowfabric.merge_all(coalesce(v_document, flowfabric.document_of(head.partition, head.id, head.attempt_index)), v_patches);
        insert into flowfabric.summary as s (partition, id, attempt_index, version, first_ms, document)
        values (head.partition, head.id, head.attempt_index, head.version,
                coalesce((select f.ms from flowfabric.frame f
                          where f.partition = head.partition and f.id = head.id and f.attempt_index = head.attempt_index
                            and f.mode = 'summary' order by f.version limit 1), p_ms), v_document)
        on conflict (partition, id, attempt_index) do update set version = excluded.version, document = excluded.document;
        head.folded := head.version;
        head.bound := octet_length(v_document::text);
    end if;
    -- The window of 64 deltas; those before it are merged. The lower end keeps the scan away from rows long removed.
    if v_before > 64 and head.version / 6 > v_before / 6 then
        delete from flowfabric.frame f
        where f.partition = head.partition and f.id = head.id and f.attempt_index = head.attempt_index and f.mode = 'summary'
          and f.version between v_before - 64 - 2100 and v_before - 64;
    end if;
end;
$$;

-- document_of: the document of a stream with all stored deltas.
create or replace function flowfabric.document_of(p_partition integer, p_id uuid, p_attempt integer) returns jsonb
language sql stable as $$
    select flowfabric.merge_all(coalesce(s.document, '{}'), array(
        select convert_from(p.payload, 'UTF8')::jsonb
        from flowfabric.frame f cross join lateral unnest(f.payloads) with ordinality as p (payload, o)
        where f.partition = p_partition and f.id = p_id and f.attempt_index = p_attempt
          and f.mode = 'summary' and f.version > coalesce(s.version, 0)
        order by f.version, p.o))
    from (values (true)) one
    left join flowfabric.summary s
           on s.partition = p_partition and s.id = p_id and s.attempt_index = p_attempt
$$;

-- merge_all: a document with patches applied, one after the other.
create or replace function flowfabric.merge_all(p_document jsonb, p_patches jsonb[]) returns jsonb
language plpgsql immutable as $$
begin
    for i in 1 .. coalesce(cardinality(p_patches), 0) loop
        p_document := flowfabric.merge_patch(p_document, p_patches[i]);
    end loop;
    return p_document;
end;
$$;
