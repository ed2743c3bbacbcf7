"""What the server stores and asks: API keys, the audit log, kept answers, bulk jobs, namespaces, groups of failures."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from datetime import timedelta
from typing import Any
from uuid import UUID

import asyncpg
import pytest

import flowfabric as ff
from flowfabric._duties.bulk_work import BulkWork
from flowfabric.engine.acting import Actor
from flowfabric.errors import Conflict, Corruption, NotFound, RetriesExhausted, StateError
from flowfabric.values.api_key import ApiKeyText, Scope, parse_api_key
from flowfabric.values.attempt import Failure
from flowfabric.values.bulk import BulkState, ExecutionFilter
from flowfabric.values.event import OperatorEvent, operator_event
from flowfabric.values.execution import NewExecution
from flowfabric.values.ids import mint_uuid
from flowfabric.values.kept_answer import AnswerKey, Repeat
from flowfabric.values.operator_audit import AuditFilter
from flowfabric.values.state import State
from tests.support import WORKER, Clock, submit

DAY = timedelta(days=1)
HOUR = timedelta(hours=1)


# ---- API keys


async def test_a_key_is_shown_once_and_only_a_digest_is_stored(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    made = await plain_engine.create_api_key("ci", {"submit", Scope.READ}, namespaces=["b", "a"], hides_payloads=True)
    text = made.key.reveal()
    prefix, key_id, secret = text.split("_", 2)
    assert (prefix, key_id) == ("ffk", made.key_id)
    assert secret not in repr(made) and secret not in str(made.key)
    row = await sql.fetchrow("select * from flowfabric.api_key")
    assert row["digest"] == hashlib.sha256(secret.encode()).digest()
    assert secret not in str(dict(row))
    (listed,) = (await plain_engine.list_api_keys()).items
    assert listed.scopes == (Scope.READ, Scope.SUBMIT)
    assert (listed.namespaces, listed.hides_payloads) == (("a", "b"), True)
    assert await plain_engine.verify_api_key(text) == listed
    stored = await plain_engine.read_api_key(key_id)
    assert str(stored.digests[0]) not in repr(stored)


async def test_secrets_are_256_random_bits(plain_engine: ff.Engine) -> None:
    made = {ApiKeyText.make().reveal() for _ in range(100)}
    assert len(made) == 100
    assert all(parse_api_key(text) for text in made)
    assert all(len(text.split("_", 2)[2]) == 43 for text in made)  # base64 of 32 bytes


async def test_text_that_is_not_a_key_is_refused_like_a_wrong_one(plain_engine: ff.Engine) -> None:
    made = await plain_engine.create_api_key("ci", ["read"])
    text = made.key.reveal()
    other = ApiKeyText.make(made.key_id).reveal()
    unknown = ApiKeyText.make().reveal()
    for wrong in ("", "x", text[:-1], text + "x", text.upper(), f" {text}", other, unknown, "ffk__", None, 5):
        assert await plain_engine.verify_api_key(wrong) is None, wrong  # type: ignore[arg-type]
    assert await plain_engine.verify_api_key(text)


async def test_the_check_of_a_key_does_the_same_work_for_every_key(
    plain_engine: ff.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await plain_engine.create_api_key("ci", ["read"])
    revoked = await plain_engine.create_api_key("gone", ["read"])
    await plain_engine.revoke_api_key(revoked.key_id)
    work: list[str] = []
    fetch = plain_engine._database.fetch

    async def counted(*args: Any, **given: Any) -> Any:
        work.append("statement")
        return await fetch(*args, **given)

    same = hmac.compare_digest

    def compared(a: Any, b: Any) -> bool:
        work.append(f"compare {len(a)} {len(b)}")
        return same(a, b)

    monkeypatch.setattr(plain_engine._database, "fetch", counted)
    monkeypatch.setattr(hmac, "compare_digest", compared)
    done = []
    for key in (made.key, ApiKeyText.make(made.key_id), revoked.key, ApiKeyText.make()):
        work.clear()
        await plain_engine.verify_api_key(key.reveal())
        done.append(list(work))
    assert done == [["statement", "compare 32 32", "compare 32 32"]] * 4


async def test_a_key_stops_working_when_it_is_revoked_or_expires(plain_engine: ff.Engine, clock: Clock) -> None:
    first = await plain_engine.create_api_key("first", ["read"])
    second = await plain_engine.create_api_key("second", ["read"], expires=HOUR)
    third = await plain_engine.create_api_key("third", ["read"], expires=await clock.now() + DAY)

    async def working() -> list[bool]:
        found = [await plain_engine.verify_api_key(one.key.reveal()) for one in (first, second, third)]
        usable = {one.name for one in (await plain_engine.list_api_keys(usable=True)).items}
        assert usable == {one.name for one in found if one is not None}
        return [one is not None for one in found]

    assert await working() == [True, True, True]
    await clock.advance(seconds=3601)
    assert await working() == [True, False, True]
    for _ in range(2):
        await plain_engine.revoke_api_key(first.key_id)
    assert await working() == [False, False, True]
    await clock.advance(seconds=86_400)
    assert await working() == [False, False, False]
    assert len((await plain_engine.list_api_keys()).items) == 3
    with pytest.raises(NotFound):
        await plain_engine.revoke_api_key("0" * 12)


async def test_a_rotated_key_keeps_its_id_and_its_old_secret_for_a_while(plain_engine: ff.Engine, clock: Clock) -> None:
    old = await plain_engine.create_api_key("ci", ["read"])
    new = await plain_engine.rotate_api_key(old.key_id, grace=HOUR)
    assert (new.key_id, new.name) == (old.key_id, "ci")
    assert await plain_engine.verify_api_key(old.key.reveal()) == await plain_engine.verify_api_key(new.key.reveal())
    await clock.advance(seconds=3601)
    assert await plain_engine.verify_api_key(old.key.reveal()) is None
    newest = await plain_engine.rotate_api_key(old.key_id)
    assert await plain_engine.verify_api_key(new.key.reveal()) is None
    assert await plain_engine.verify_api_key(newest.key.reveal())
    last = await plain_engine.rotate_api_key(old.key_id, grace=HOUR)
    await plain_engine.revoke_api_key(old.key_id)
    for key in (newest, last):
        assert await plain_engine.verify_api_key(key.key.reveal()) is None
    with pytest.raises(StateError) as refused:
        await plain_engine.rotate_api_key(old.key_id)
    assert refused.value.kind == "api_key_revoked"
    with pytest.raises(NotFound):
        await plain_engine.rotate_api_key("0" * 12)


async def test_two_usable_keys_cannot_share_a_name(plain_engine: ff.Engine) -> None:
    first = await plain_engine.create_api_key("alice", ["read"])
    with pytest.raises(Conflict) as refused:
        await plain_engine.create_api_key("alice", ["admin"])
    assert refused.value.kind == "api_key_exists"
    await plain_engine.revoke_api_key(first.key_id)
    assert await plain_engine.create_api_key("alice", ["admin"])


async def test_keys_are_listed_newest_first_in_pages(plain_engine: ff.Engine) -> None:
    names = [f"key {n}" for n in range(7)]
    for name in names:
        await plain_engine.create_api_key(name, ["read"])
    seen: list[str] = []
    cursor = None
    while True:
        page = await plain_engine.list_api_keys(cursor=cursor, limit=3)
        seen += [one.name for one in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert seen == names[::-1]


async def test_the_last_use_is_written_at_most_once_a_minute(
    plain_engine: ff.Engine, clock: Clock, sql: asyncpg.Connection[Any]
) -> None:
    made = await plain_engine.create_api_key("ci", ["read"])
    tids = []
    for seconds in (0, 30, 29, 2):
        await clock.advance(seconds=seconds)
        await plain_engine.note_api_key_use(made.key_id)
        tids.append(await sql.fetchval("select ctid::text from flowfabric.api_key"))
    assert tids[0] == tids[1] == tids[2] != tids[3]
    (listed,) = (await plain_engine.list_api_keys()).items
    assert listed.last_used_at is not None


# ---- acting and the audit log


def alice(operation: str = "cancel_execution", **fields: Any) -> Actor:
    given = {"key_id": "0" * 12, "address": "10.0.0.1", "request_id": "r-1", "target": "t", **fields}
    return Actor(name="alice", operation=operation, **given)


async def outcomes(engine: ff.Engine) -> list[str]:
    return [f"{one.operation} {one.outcome}" for one in (await engine.list_operator_audit()).items]


async def test_an_action_and_its_row_of_the_audit_log_commit_together(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    target = await submit(plain_engine)
    async with plain_engine.acting(alice()) as engine:
        await engine.cancel_many([target], "enough")
        assert await sql.fetchval("select state from flowfabric.execution") == "waiting"
        assert await sql.fetchval("select count(*) from flowfabric.operator_audit") == 0
    assert await plain_engine.read_execution_state(target) is State.CANCELLED
    (row,) = (await plain_engine.list_operator_audit()).items
    assert (row.actor, row.key_id, row.address, row.operation, row.target, row.outcome, row.request_id) == (
        "alice", "0" * 12, "10.0.0.1", "cancel_execution", "t", "ok", "r-1",
    )  # fmt: skip


async def test_events_carry_the_actor_only_inside_an_acting_transaction(plain_engine: ff.Engine) -> None:
    first, second = await submit(plain_engine), await submit(plain_engine)
    async with plain_engine.acting(alice()) as engine:
        await engine.change_priority(first, 7)
    for _ in range(20):  # on the same connection, most likely
        await plain_engine.change_priority(second, 8)
    found = [
        (event.execution_id, event.actor, operator_event(event).actor)
        for target in (first, second)
        for event in (await plain_engine.list_events(target)).items
        if event.operator_type is not None
    ]
    assert found == [(first, "alice", "alice"), *[(second, None, None)] * 20]
    page = await plain_engine.read_events()
    operators = [operator_event(one) for one in page.items if one.operator_type is not None]
    assert [one.actor for one in operators] == ["alice", *[None] * 20]
    assert all(isinstance(one, OperatorEvent) for one in operators)


async def test_a_refusal_commits_what_it_committed_and_is_recorded(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    target = await submit(plain_engine)
    with pytest.raises(StateError):
        async with plain_engine.acting(alice("replay")) as engine:
            await engine.set_execution_tag(target, "a.b", "c")
            await engine.replay_execution(target)
    assert await sql.fetchval("select tags ->> 'a.b' from flowfabric.execution") == "c"
    with pytest.raises(NotFound):
        async with plain_engine.acting(alice("replay")) as engine:
            await engine.replay_execution(mint_uuid())  # type: ignore[arg-type]
    assert await outcomes(plain_engine) == ["replay not_found", "replay execution_not_terminal"]


async def test_a_defect_rolls_back_and_is_recorded(plain_engine: ff.Engine) -> None:
    target = await submit(plain_engine)
    with pytest.raises(ZeroDivisionError):
        async with plain_engine.acting(alice()) as engine:
            await engine.cancel_many([target], "enough")
            raise ZeroDivisionError
    assert await plain_engine.read_execution_state(target) is State.WAITING
    with pytest.raises(ff.FlowFabricError):
        async with plain_engine.acting(alice()) as engine:
            await engine.cancel_many([target], "enough")
            await engine._fetch("select 1 / 0")
    assert await plain_engine.read_execution_state(target) is State.WAITING
    assert await outcomes(plain_engine) == ["cancel_execution other", "cancel_execution internal"]
    assert await plain_engine.read_execution_info(target)  # the connections work


async def test_a_connection_that_dies_leaves_neither_the_change_nor_its_row(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    target = await submit(plain_engine)
    with pytest.raises(ff.FlowFabricError):
        async with plain_engine.acting(alice()) as engine:
            await engine.cancel_many([target], "enough")
            pid = (await engine._row("select pg_backend_pid() as pid"))["pid"]
            await sql.execute("select pg_terminate_backend($1, 5000)", pid)
            await engine.change_priority(target, 3)
    assert await plain_engine.read_execution_state(target) is State.WAITING
    assert await outcomes(plain_engine) == ["cancel_execution transport"]


async def test_a_cancelled_request_leaves_nothing(plain_engine: ff.Engine) -> None:
    target = await submit(plain_engine)
    reached = asyncio.Event()

    async def request() -> None:
        async with plain_engine.acting(alice()) as engine:
            await engine.cancel_many([target], "enough")
            reached.set()
            await asyncio.Event().wait()

    task = asyncio.ensure_future(request())
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await plain_engine.read_execution_state(target) is State.WAITING
    assert await outcomes(plain_engine) == []


async def test_a_deadlock_asks_the_caller_to_begin_again(plain_engine: ff.Engine, sql: asyncpg.Connection[Any]) -> None:
    target = await submit(plain_engine)
    with pytest.raises(RetriesExhausted):
        async with plain_engine.acting(alice()) as engine:
            await engine.cancel_many([target], "enough")
            await engine._fetch("do $$ begin raise exception 'd' using errcode = 'deadlock_detected'; end $$")
    assert await plain_engine.read_execution_state(target) is State.WAITING
    assert await outcomes(plain_engine) == []


async def test_without_an_audit_there_is_a_transaction_and_no_row(plain_engine: ff.Engine) -> None:
    target = await submit(plain_engine)
    async with plain_engine.acting(alice(is_audited=False)) as engine:
        await engine.cancel_many([target], "enough")
    assert await plain_engine.read_execution_state(target) is State.CANCELLED
    assert await outcomes(plain_engine) == []


async def test_the_audit_log_is_filtered_paged_and_trimmed_by_age(
    plain_engine: ff.Engine, clock: Clock, sql: asyncpg.Connection[Any]
) -> None:
    for n in range(10):
        await plain_engine.write_operator_audit(Actor(name=f"a{n % 2}", operation=f"o{n}", target=f"t{n}"), "ok")
    seen: list[str] = []
    cursor = None
    while True:
        page = await plain_engine.list_operator_audit(AuditFilter(actor="a1"), before=cursor, limit=2)
        seen += [one.operation for one in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert seen == ["o9", "o7", "o5", "o3", "o1"]
    now = await clock.now()
    for wanted, count in (
        (AuditFilter(target="t3"), 1),
        (AuditFilter(operation="o3", actor="a0"), 0),
        (AuditFilter(since=now), 0),
        (AuditFilter(until=now), 10),
        (AuditFilter(key_id="x"), 0),
        (AuditFilter(outcome="ok"), 10),
    ):
        assert len((await plain_engine.list_operator_audit(wanted)).items) == count, wanted
    await plain_engine.sweep()
    assert len(await outcomes(plain_engine)) == 10
    await clock.advance(days=401)
    await plain_engine.write_operator_audit(Actor(name="a", operation="new"), "ok")
    await plain_engine.sweep()
    assert await outcomes(plain_engine) == ["new ok"]


# ---- kept answers


def answer_key(key: str = "k", *, key_id: str = "", operation: str = "o", holder: int = 1) -> AnswerKey:
    return AnswerKey(key_id=key_id, operation=operation, idempotency_key=key, holder=UUID(int=holder))


async def test_a_repeat_gets_the_kept_answer(plain_engine: ff.Engine, clock: Clock) -> None:
    assert (await plain_engine.begin_answer(answer_key(), b"r")).repeat is Repeat.NEW
    assert (await plain_engine.begin_answer(answer_key(holder=2), b"r")).repeat is Repeat.UNDER_WAY
    assert (await plain_engine.begin_answer(answer_key(holder=2), b"s")).repeat is Repeat.OTHER_REQUEST
    await plain_engine.finish_answer(answer_key(), status=201, headers={"location": "/x"}, body=b"{}")
    again = await plain_engine.begin_answer(answer_key(holder=2), b"r")
    assert (again.repeat, again.status, again.headers, again.body) == (Repeat.DONE, 201, {"location": "/x"}, b"{}")
    assert (await plain_engine.begin_answer(answer_key(holder=2), b"s")).repeat is Repeat.OTHER_REQUEST
    for other in (answer_key("other"), answer_key(key_id="a"), answer_key(operation="p")):
        assert (await plain_engine.begin_answer(other, b"s")).repeat is Repeat.NEW
    await clock.advance(hours=23)
    assert (await plain_engine.begin_answer(answer_key(holder=2), b"r")).repeat is Repeat.DONE
    await clock.advance(hours=2)
    assert (await plain_engine.begin_answer(answer_key(holder=2), b"s")).repeat is Repeat.NEW


async def test_an_answer_with_a_secret_is_remembered_but_not_kept(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    await plain_engine.begin_answer(answer_key(), b"r")
    await plain_engine.finish_answer(answer_key(), status=None, headers={"a": "secret"}, body=b"secret")
    again = await plain_engine.begin_answer(answer_key(holder=2), b"r")
    assert (again.repeat, again.status, again.body) == (Repeat.DONE, None, b"")
    assert "secret" not in str(dict(await sql.fetchrow("select * from flowfabric.kept_answer")))


async def test_a_request_that_did_nothing_is_forgotten(plain_engine: ff.Engine) -> None:
    await plain_engine.begin_answer(answer_key(), b"r")
    await plain_engine.forget_answer(answer_key(holder=2))
    assert (await plain_engine.begin_answer(answer_key(holder=2), b"r")).repeat is Repeat.UNDER_WAY
    await plain_engine.forget_answer(answer_key())
    assert (await plain_engine.begin_answer(answer_key(holder=2), b"s")).repeat is Repeat.NEW


async def test_a_request_whose_server_died_can_be_repeated_and_is_done_once(
    plain_engine: ff.Engine, clock: Clock
) -> None:
    target = await submit(plain_engine)
    await plain_engine.begin_answer(answer_key(), b"r", held_for=timedelta(seconds=30))
    await clock.advance(seconds=31)
    assert (await plain_engine.begin_answer(answer_key(holder=2), b"r")).repeat is Repeat.NEW
    # The first one was only slow: it does not commit.
    with pytest.raises(Conflict) as refused:
        async with plain_engine.acting(alice()) as engine:
            await engine.cancel_many([target], "enough")
            await engine.finish_answer(answer_key(), status=200)
    assert refused.value.kind == "request_in_progress"
    assert await plain_engine.read_execution_state(target) is State.WAITING
    async with plain_engine.acting(alice()) as engine:
        await engine.cancel_many([target], "enough")
        await engine.finish_answer(answer_key(holder=2), status=200)
    assert await plain_engine.read_execution_state(target) is State.CANCELLED
    assert await outcomes(plain_engine) == ["cancel_execution ok", "cancel_execution request_in_progress"]


async def test_one_of_many_simultaneous_repeats_is_new(plain_engine: ff.Engine) -> None:
    found = await asyncio.gather(*(plain_engine.begin_answer(answer_key(holder=n), b"r") for n in range(8)))
    assert sorted(one.repeat.value for one in found) == ["new", *["under_way"] * 7]


async def test_kept_answers_are_swept(plain_engine: ff.Engine, clock: Clock, sql: asyncpg.Connection[Any]) -> None:
    await plain_engine.begin_answer(answer_key(), b"r")
    await plain_engine.sweep()
    assert await sql.fetchval("select count(*) from flowfabric.kept_answer") == 1
    await clock.advance(hours=25)
    await plain_engine.sweep()
    assert await sql.fetchval("select count(*) from flowfabric.kept_answer") == 0


# ---- namespaces


async def test_an_execution_or_flow_is_in_a_namespace_or_unknown(plain_engine: ff.Engine) -> None:
    ours, theirs, plain = [await submit(plain_engine, namespace=name) for name in ("ours", "theirs", "")]
    flow = (await plain_engine.create_flow(mint_uuid(), flow_kind="f", namespace="ours")).flow_id  # type: ignore[arg-type]
    unknown: Any = mint_uuid()

    async def known(*names: str) -> list[bool]:
        return await plain_engine.in_namespaces(names, [ours, theirs, plain, unknown], [flow, unknown])

    assert await known("ours") == [True, False, False, False, True, False]
    assert await known("theirs", "") == [False, True, True, False, False, False]
    # The id of a flow is not that of an execution.
    assert await plain_engine.in_namespaces(["ours"], [flow], [ours]) == [False, False]  # type: ignore[list-item]


# ---- bulk jobs


async def some(engine: ff.Engine, count: int, kind: str = "k", **fields: Any) -> list[ff.ExecutionId]:
    made = await engine.create_many([NewExecution(execution_kind=kind, **fields)] * count)
    return [one.execution_id for one in made]  # type: ignore[union-attr]


async def failed(engine: ff.Engine, count: int, kind: str = "k", reason: str = "no") -> list[ff.ExecutionId]:
    await some(engine, count, kind)
    held = await engine.claim_many(limit=count, kinds=[kind], **WORKER)
    await engine.fail_many([Failure(authority=one.handle, reason=reason, failure_class="permanent") for one in held])
    return [one.execution_id for one in held]


async def test_a_bulk_job_cancels_what_matched_when_it_began(plain_engine: ff.Engine) -> None:
    targets = await some(plain_engine, 25)
    others = await some(plain_engine, 3, "other")
    wanted = ExecutionFilter(kinds=("k",))
    preview = await plain_engine.preview_bulk("cancel", wanted)
    assert (preview.count, preview.is_exact, len(preview.sample)) == (25, True, 10)
    job = await plain_engine.create_bulk("cancel", wanted, actor="alice", reason="enough")
    assert await plain_engine.create_bulk("cancel", wanted, actor="alice", bulk_id=job) == job
    later = await some(plain_engine, 2)
    states = [await plain_engine.run_bulk(job, limit=10) for _ in range(3)]
    assert states == [(BulkState.RUNNING, 10), (BulkState.RUNNING, 10), (BulkState.DONE, 5)]
    assert await plain_engine.run_bulk(job) == (None, 0)
    found = await plain_engine.read_bulk(job)
    assert found is not None
    assert (found.state, found.changed, found.unchanged, found.refused) == (BulkState.DONE, 25, 0, 0)
    assert found.ended_at is not None
    outcome = await plain_engine.read_outcomes(targets)
    assert {(one.state, one.cancellation_reason) for one in outcome.values()} == {(State.CANCELLED, "enough")}
    for one in (*others, *later):
        assert await plain_engine.read_execution_state(one) is State.WAITING


async def test_the_events_of_a_bulk_job_carry_its_actor(plain_engine: ff.Engine) -> None:
    targets = await failed(plain_engine, 3)
    job = await plain_engine.create_bulk("replay", ExecutionFilter(kinds=("k",)), actor="alice", reason="fixed")
    assert await plain_engine.run_bulk(job) == (BulkState.DONE, 3)
    page = await plain_engine.read_events()
    assert [one.actor for one in page.items if one.operator_type == "replayed"] == ["alice"] * 3
    for target in targets:
        assert await plain_engine.read_execution_state(target) is State.WAITING
    assert not [one for one in (await plain_engine.read_events(after=page.next_cursor)).items if one.actor]


async def test_a_bulk_job_counts_refusals_and_names_the_first(plain_engine: ff.Engine) -> None:
    targets = await failed(plain_engine, 25)
    for target in targets:
        await plain_engine.redact_execution(target)
    good = await failed(plain_engine, 2)
    job = await plain_engine.create_bulk("replay", ExecutionFilter(kinds=("k",)), actor="alice")
    assert await plain_engine.run_bulk(job, limit=15) == (BulkState.RUNNING, 15)
    assert await plain_engine.run_bulk(job, limit=15) == (BulkState.DONE, 12)
    found = await plain_engine.read_bulk(job)
    assert found is not None and (found.changed, found.refused, len(found.refusals)) == (2, 25, 20)
    assert {one.code for one in found.refusals} == {"execution_redacted"}
    assert {one.execution_id for one in found.refusals} <= set(targets)
    assert await plain_engine.read_execution_state(good[0]) is State.WAITING


async def test_a_stopped_bulk_job_does_nothing_more(plain_engine: ff.Engine) -> None:
    await some(plain_engine, 20, namespace="ours")
    wanted = ExecutionFilter(namespace="ours")
    job = await plain_engine.create_bulk("cancel", wanted, actor="alice")
    await plain_engine.run_bulk(job, limit=5)
    for namespaces in (["theirs"], ["", "other"]):
        assert await plain_engine.read_bulk(job, namespaces=namespaces) is None
        with pytest.raises(NotFound):
            await plain_engine.stop_bulk(job, namespaces=namespaces)
    for _ in range(2):
        assert await plain_engine.stop_bulk(job, namespaces=["ours"]) is BulkState.STOPPED
    assert await plain_engine.run_bulk(job) == (None, 0)
    assert await plain_engine.list_running_bulk() == []
    found = await plain_engine.read_bulk(job, namespaces=["ours"])
    assert found is not None and (found.state, found.changed) == (BulkState.STOPPED, 5)
    assert (await plain_engine.preview_bulk("cancel", wanted)).count == 15
    with pytest.raises(NotFound):
        await plain_engine.stop_bulk(mint_uuid())
    everywhere = await plain_engine.create_bulk("cancel", ExecutionFilter(kinds=("k",)), actor="alice")
    assert await plain_engine.read_bulk(everywhere, namespaces=["ours"]) is None


async def test_a_process_passes_over_a_job_that_another_runs_and_continues_it_when_that_dies(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    await some(plain_engine, 10)
    job = await plain_engine.create_bulk("cancel", ExecutionFilter(kinds=("k",)), actor="alice")
    other = await asyncpg.connect(plain_engine.dsn)
    transaction = other.transaction()
    await transaction.start()
    await other.fetch("select * from flowfabric.run_bulk($1, 4, 1000)", job)
    assert await plain_engine.run_bulk(job) == (None, 0)
    other.terminate()  # in the middle of its chunk

    async def rolled_back() -> bool:
        return (await plain_engine.run_bulk(job, limit=4))[1] == 4

    async with asyncio.timeout(30):
        while not await rolled_back():
            pass
    assert await BulkWork(plain_engine).run_once() == 6
    found = await plain_engine.read_bulk(job)
    assert found is not None and (found.state, found.changed) == (BulkState.DONE, 10)


async def test_a_job_that_cannot_continue_fails_and_others_run(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    await some(plain_engine, 3)
    bad = await plain_engine.create_bulk("cancel", ExecutionFilter(kinds=("k",)), actor="alice")
    good = await plain_engine.create_bulk("cancel", ExecutionFilter(kinds=("k",)), actor="alice")

    class Broken(ff.Engine):
        async def run_bulk(self, bulk_id: UUID, **given: Any) -> Any:
            if bulk_id == bad:
                raise Corruption("a row cannot be read")
            return await super().run_bulk(bulk_id, **given)

    engine = Broken(plain_engine._database, None)
    assert await BulkWork(engine).run_once() == 3
    found = await plain_engine.read_bulk(bad)
    assert found is not None and found.state is BulkState.FAILED and "cannot be read" in (found.failure or "")
    assert (await plain_engine.read_bulk(good)).state is BulkState.DONE  # type: ignore[union-attr]
    await sql.execute("update flowfabric.bulk_job set ended_at = ended_at - interval '15 days' where id = $1", bad)
    await plain_engine.sweep()
    assert await plain_engine.read_bulk(bad) is None
    assert await plain_engine.read_bulk(good) is not None


async def test_the_states_of_a_bulk_job_are_those_it_can_change(plain_engine: ff.Engine) -> None:
    await failed(plain_engine, 2)
    waiting = await some(plain_engine, 3)
    await plain_engine.cancel_many(waiting[:1], "no")
    wanted = ExecutionFilter(kinds=("k",))
    assert (await plain_engine.preview_bulk("cancel", wanted)).count == 2
    assert (await plain_engine.preview_bulk("replay", wanted)).count == 2
    both = ExecutionFilter(kinds=("k",), states=(State.FAILED, State.CANCELLED))
    assert (await plain_engine.preview_bulk("replay", both)).count == 3
    with pytest.raises(ff.InvalidInput, match=r"filter\.states"):
        await plain_engine.preview_bulk("cancel", both)


# ---- failures


async def test_failures_are_grouped_by_kind_error_type_and_text_without_numbers(plain_engine: ff.Engine) -> None:
    trace = "\n\nTraceback (most recent call last):\n  File 'x.py', line 3, in f\nValueError: no"
    texts = [
        "app.errors.NoRoom: 17 of 20 full" + trace,
        "app.errors.NoRoom: 3 of 1,000 full" + trace,
        f"app.errors.NoRoom: row {mint_uuid()} at 0x7f3a" + trace,
        f"app.errors.NoRoom: row {mint_uuid()} at 0x7f3b" + trace,
        "disk: full",
        "[sealed aes] abcd",
        "[sealed aes] efgh",
        "Traceback (most recent call last):\n  File 'x.py', line 3, in f\n    g()\nKeyError: 'a'",
        "",
    ]
    for text in texts:
        await failed(plain_engine, 1, "k", text)
    await failed(plain_engine, 2, "other", texts[0])
    found = await plain_engine.list_failures()
    assert (found.examined, found.is_complete) == (11, True)
    groups = {(one.execution_kind, one.error_type, one.message): one.count for one in found.groups}
    assert groups == {
        ("k", "app.errors.NoRoom", "<n> of <n> full"): 2,
        ("other", "app.errors.NoRoom", "<n> of <n> full"): 2,
        ("k", "app.errors.NoRoom", "row <id> at <hex>"): 2,
        ("k", None, "disk: full"): 1,
        ("k", None, "[sealed]"): 2,
        ("k", "KeyError", "'a'"): 1,
        ("k", None, ""): 1,
    }
    assert [one.count for one in found.groups] == sorted(groups.values(), reverse=True)
    room = next(one for one in found.groups if one.execution_kind == "k" and "<n>" in one.message)
    assert room.last_text == "app.errors.NoRoom: 3 of 1,000 full"


async def test_failures_are_filtered_and_bounded(plain_engine: ff.Engine, clock: Clock) -> None:
    await some(plain_engine, 2, namespace="ours", tags={"a.b": "c"})
    await some(plain_engine, 3, namespace="theirs", lane_id="other")
    for lane in ("default", "other"):
        held = await plain_engine.claim_many(limit=5, lane_id=lane, **WORKER)
        await plain_engine.fail_many(
            [Failure(authority=one.handle, reason="no", failure_class="permanent") for one in held]
        )
    now = await clock.now()
    for given, count in (
        ({}, 5),
        ({"namespaces": ["ours"]}, 2),
        ({"namespaces": ["ours", "theirs"]}, 5),
        ({"namespaces": ["none"]}, 0),
        ({"lane_ids": ["other"]}, 3),
        ({"kinds": ["k"]}, 5),
        ({"kinds": ["x"]}, 0),
        ({"tag": ("a.b", "c")}, 2),
        ({"states": ["cancelled"]}, 0),
        ({"created_from": now}, 0),
        ({"created_before": now}, 5),
    ):
        found = await plain_engine.list_failures(**given)  # type: ignore[arg-type]
        assert sum(one.count for one in found.groups) == count, given
        assert found.is_complete
    part = await plain_engine.list_failures(most=4)
    assert (part.examined, part.is_complete) == (4, False)
