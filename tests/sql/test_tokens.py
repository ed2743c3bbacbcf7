"""The keystore and the tokens it signs: signing, verification, rotation, and secrets that are never shown.

The clock stands still in most of these tests, so that tests can check the last instant of a grace period.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import hmac
import logging
import pickle
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import asyncpg
import msgspec
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flowfabric as ff
from flowfabric.engine.service import migrate_database
from flowfabric.errors import Conflict, StateError, ValidationFailed
from flowfabric.values.attempt import Claimed
from flowfabric.values.conditions import OperatorOnly, all_of, on
from flowfabric.values.keystore import (
    AlreadySeeded,
    Rotated,
    Rotation,
    RotationNoop,
    Seeded,
    VerifyingKid,
    WaitpointKids,
)
from flowfabric.values.signal import Accepted, DuplicateSignal
from flowfabric.values.wait import Fresh, Suspended, UsePending, WaitpointToken
from tests import sampling
from tests.ids import home, id_in
from tests.integration.test_connection import a_role, as_user
from tests.support import WORKER, CheckedEngine, Clock, claim_one, new_id, submit

A, B, C = "aa" * 32, "bb" * 32, "cc" * 32
SECRET = "ab" * 32
HOUR = timedelta(hours=1)
GRACE = timedelta(seconds=10)
TICK = timedelta(microseconds=1)
PATIENCE = 60.0


def signed(kid: str, secret: str, execution_id: UUID | str, waitpoint_id: UUID) -> str:
    """A token as any holder of the secret would make it: signed messages name the partition before the id."""
    name = execution_id if isinstance(execution_id, str) else f"{{fp:{home(execution_id)}}}:{execution_id}"
    message = f"{kid}:{name}:{waitpoint_id}".encode()
    return f"{kid}:{hmac.new(bytes.fromhex(secret), message, hashlib.sha256).hexdigest()}"


@dataclass(frozen=True)
class Spot:
    """A waitpoint, the right to signal it, and the lease of the execution it belongs to."""

    claimed: Claimed
    waitpoint_id: UUID
    token: WaitpointToken

    @property
    def id(self) -> ff.ExecutionId:
        return self.claimed.execution_id

    @property
    def text(self) -> str:
        return self.token.reveal()

    @property
    def digest(self) -> str:
        return self.text.partition(":")[2]


async def hold(engine: ff.Engine, *, partition: int = 7) -> Claimed:
    execution_id = id_in(partition)
    await submit(engine, execution_id=execution_id, idempotency_key=None, flow_id=None)
    return await claim_one(engine, lease_ttl=timedelta(days=300))


async def spot(engine: ff.Engine, claimed: Claimed | None = None, *, partition: int = 7, key: str = "k") -> Spot:
    """A pending waitpoint."""
    claimed = claimed or await hold(engine, partition=partition)
    made = await engine.create_waitpoint(claimed.handle, key, timedelta(days=200))
    return Spot(claimed, made.waitpoint_id, made.token)


async def deliver(engine: ff.Engine, at: Spot, token: Any = None, **fields: Any) -> Accepted | DuplicateSignal:
    call = {"execution_id": at.id, "waitpoint_id": at.waitpoint_id, "signal_name": "x", "source_type": "person"}
    return await engine.deliver_signal(**{"waitpoint_token": at.token if token is None else token, **call, **fields})


async def refused(engine: ff.Engine, at: Spot, token: Any = None, **fields: Any) -> str:
    """The detail of the refusal that a token gets, after a look that it is one and tells nothing."""
    with pytest.raises(ValidationFailed) as error:
        await deliver(engine, at, token, **fields)
    assert error.value.kind == "invalid_token"
    assert str(error.value) == f"invalid_token: {error.value.detail}"
    return error.value.detail


async def accepted(engine: ff.Engine, at: Spot, token: Any = None) -> None:
    assert isinstance(await deliver(engine, at, token), Accepted)


EVERYTHING = """
create or replace function pg_temp.everything() returns text language plpgsql as $$
declare
    v_name text;
    v_one text;
    v_all text := '';
begin
    for v_name in select relname from pg_class where relnamespace = 'flowfabric'::regnamespace and relkind = 'r'
                  and relname <> 'sleeper' order by relname loop
        execute format('select string_agg(r, chr(10) order by r) from ('
                       'select (to_jsonb(t) - ''hmac_failed_at'')::text as r from flowfabric.%I t) x', v_name)
        into v_one;
        v_all := v_all || chr(10) || v_name || ' ' || coalesce(v_one, '');
    end loop;
    return v_all;
end;
$$
"""


async def everything(sql: asyncpg.Connection[Any]) -> str:
    """All that is stored, but when a token was refused."""
    await sql.execute(EVERYTHING)
    return str(await sql.fetchval("select pg_temp.everything()"))


async def stamp(engine: ff.Engine, execution_id: ff.ExecutionId) -> datetime | None:
    record = await engine.read_execution(execution_id)
    assert record is not None
    return record.last_hmac_validation_failed_at


async def stop_clock(sql: asyncpg.Connection[Any]) -> None:
    """From now on time passes only when the clock is advanced."""
    now = await sql.fetchval("select date_trunc('second', clock_timestamp())")
    await sql.execute(
        "create or replace function flowfabric.now() returns timestamptz language sql volatile as"
        f" $$ select timestamptz '{now.isoformat()}' + shift from flowfabric.clock $$"
    )


@pytest_asyncio.fixture(loop_scope="session")
async def still(sql: asyncpg.Connection[Any], clock: Clock) -> Clock:
    await stop_clock(sql)
    return clock


async def advance(clock: Clock, by: timedelta) -> None:
    await clock.advance(seconds=by.total_seconds())


async def empty_keystore(sql: asyncpg.Connection[Any]) -> None:
    await sql.execute("delete from flowfabric.keystore")


async def install(
    sql: asyncpg.Connection[Any], kid: str, secret: str | None, state: str, expires_at: Any = None
) -> None:
    """A key in any state, behind the back of the engine."""
    raw = None if secret is None else bytes.fromhex(secret)
    await sql.execute(
        "insert into flowfabric.keystore values ($1, flowfabric.hmac_block($2, 54), flowfabric.hmac_block($2, 92), $3,"
        " flowfabric.now(), $4)",
        kid, raw, state, expires_at,
    )  # fmt: skip


async def states(sql: asyncpg.Connection[Any]) -> dict[str, str]:
    return {row["kid"]: row["state"] for row in await sql.fetch("select kid, state from flowfabric.keystore")}


async def rotate(engine: ff.Engine, kid: str, secret: str, grace: timedelta = HOUR) -> Any:
    """The one entry that a rotation answers."""
    (entry,) = await engine.rotate_waitpoint_hmac_secret_all(kid, secret, grace)
    assert isinstance(entry, Rotation) and entry.partition == 0
    return entry.result


# What is signed


async def test_a_token_has_the_published_check_value(sql: asyncpg.Connection[Any], engine: ff.Engine) -> None:
    await rotate(engine, "kid-1", SECRET)
    token = await sql.fetchval(
        "select flowfabric.sign_token('kid-1', 0, '11111111-1111-4111-8111-111111111111',"
        " '22222222-2222-4222-8222-222222222222')"
    )
    assert token == "kid-1:56fca95f269d3ee28fbfbc3ee71418f7fffd0626d85a1c0d864998cbac02af87"
    waitpoint = UUID("22222222-2222-4222-8222-222222222222")
    assert token == signed("kid-1", SECRET, "{fp:0}:11111111-1111-4111-8111-111111111111", waitpoint)


async def test_every_token_is_signed_over_its_kid_its_execution_and_its_waitpoint(engine: ff.Engine) -> None:
    await rotate(engine, "kid-1", SECRET)
    for partition in (0, 7, 255):
        at = await spot(engine, partition=partition)
        assert at.text == signed("kid-1", SECRET, at.id, at.waitpoint_id)
    claimed = await hold(engine)
    ids = [new_id(), new_id()]
    suspended = await engine.suspend(
        claimed.handle, waitpoints=[Fresh(ids[0], "a"), Fresh(ids[1], "b")], resume_condition=all_of("a", "b")
    )
    assert isinstance(suspended, Suspended)
    details = suspended.details
    tokens = [details.waitpoint_token, details.additional_waitpoints[0].waitpoint_token]
    assert [token.reveal() for token in tokens] == [signed("kid-1", SECRET, claimed.execution_id, one) for one in ids]


async def test_signing_twice_gives_the_same_token_and_the_key_label_is_not_part_of_it(engine: ff.Engine) -> None:
    at = await spot(engine)
    partition = home(at.id)
    for _ in range(2):
        assert await engine.read_waitpoint_token(partition, at.waitpoint_id) == at.token
    twin = await spot(engine, at.claimed)
    assert twin.token != at.token, "two waitpoints of one key have two tokens"


async def test_any_legal_kid_signs_and_verifies(engine: ff.Engine) -> None:
    before = "k1"
    for kid in ("!", "~", "a.b", "-", "k" * 64, "%s", "'", '"', "\\", "{fp;0}", "0"):
        assert await rotate(engine, kid, SECRET) == Rotated(before, kid, 0)
        at = await spot(engine)
        assert at.text == signed(kid, SECRET, at.id, at.waitpoint_id)
        assert at.token.kid == kid
        await accepted(engine, at)
        before = kid


async def test_a_secret_may_be_written_in_either_case(engine: ff.Engine) -> None:
    for kid, secret in (("upper", SECRET.upper()), ("mixed", "aB" * 32)):
        await rotate(engine, kid, secret)
        at = await spot(engine)
        assert at.text == signed(kid, SECRET, at.id, at.waitpoint_id)
        assert await rotate(engine, kid, SECRET) == RotationNoop(kid)


async def test_nothing_is_minted_while_the_keystore_is_empty(engine: ff.Engine, sql: asyncpg.Connection[Any]) -> None:
    at = await spot(engine)
    await empty_keystore(sql)
    before = await everything(sql)
    for call in (
        engine.create_waitpoint(at.claimed.handle, "k", HOUR),
        engine.suspend(at.claimed.handle, waitpoints=[Fresh(new_id(), "k")], resume_condition=on("k")),
    ):
        with pytest.raises(ff.InvalidInput, match="hmac_secret_not_initialized"):
            await call
    assert await everything(sql) == before
    assert await refused(engine, at) == "invalid_token"
    assert await engine.list_waitpoint_hmac_kids() == WaitpointKids(None, ())
    # Calls that mint nothing still work, and operators are not locked out.
    suspended = await engine.suspend(
        at.claimed.handle, waitpoints=[UsePending(at.waitpoint_id)], resume_condition=on("k")
    )
    assert isinstance(suspended, Suspended)
    await engine.resume_execution(at.id, "operator")


# Verification


FORGED: dict[str, Callable[[str, str], str]] = {
    "no colon": lambda kid, digest: kid + digest,
    "kid alone": lambda kid, digest: kid,
    "digest alone": lambda kid, digest: digest,
    "kid and colon": lambda kid, digest: f"{kid}:",
    "no kid": lambda kid, digest: f":{digest}",
    "colon alone": lambda kid, digest: ":",
    "blank": lambda kid, digest: " ",
    "two colons": lambda kid, digest: f"{kid}::{digest}",
    "three parts": lambda kid, digest: f"{kid}:{digest}:",
    "swapped": lambda kid, digest: f"{digest}:{kid}",
    "truncated by one": lambda kid, digest: f"{kid}:{digest[:-1]}",
    "truncated to half": lambda kid, digest: f"{kid}:{digest[:32]}",
    "truncated to 40": lambda kid, digest: f"{kid}:{digest[:40]}",
    "one more": lambda kid, digest: f"{kid}:{digest}0",
    "twice": lambda kid, digest: f"{kid}:{digest}{digest}",
    "upper case": lambda kid, digest: f"{kid}:{digest.upper()}",
    "upper case kid": lambda kid, digest: f"{kid.upper()}:{digest}",
    "newline behind": lambda kid, digest: f"{kid}:{digest}\n",
    "newline for the last": lambda kid, digest: f"{kid}:{digest[:-1]}\n",
    "blank before": lambda kid, digest: f" {kid}:{digest}",
    "blank behind": lambda kid, digest: f"{kid}:{digest} ",
    "blank after the colon": lambda kid, digest: f"{kid}: {digest}",
    "no hex": lambda kid, digest: f"{kid}:{digest[:-1]}g",
    "hex with a prefix": lambda kid, digest: f"{kid}:0x{digest[2:]}",
    "wide digits": lambda kid, digest: f"{kid}:{''.join(chr(ord(c) + 0xFEE0) for c in digest)}",
    "a wide colon": lambda kid, digest: f"{kid}\uff1a{digest}",
    "a joiner inside": lambda kid, digest: f"{kid}:{digest}\u200d",
    "another alphabet": lambda kid, digest: f"{kid}:" + "\u0430" * 64,
    "NUL behind": lambda kid, digest: f"{kid}:{digest}\0",
    "NUL inside": lambda kid, digest: f"{kid}\0:{digest}",
    "lone surrogate": lambda kid, digest: f"{kid}:{digest[:-1]}\ud800",
    "zeros": lambda kid, digest: f"{kid}:{'0' * 64}",
    "reversed": lambda kid, digest: f"{kid}:{digest[::-1]}",
    "unknown kid": lambda kid, digest: f"other:{digest}",
    "longer kid": lambda kid, digest: f"{kid}{kid}:{digest}",
    "very long": lambda kid, digest: f"{kid}:{digest * 100_000}",
    "SQL": lambda kid, digest: f"{kid}' or true --:{digest}",
    "a wild card": lambda kid, digest: f"%:{digest}",
    "plain SHA-256": lambda kid, digest: f"{kid}:{hashlib.sha256(digest.encode()).hexdigest()}",
}


async def test_a_token_that_was_tampered_with_is_refused_and_changes_nothing(
    engine: CheckedEngine, sql: asyncpg.Connection[Any]
) -> None:
    at = await spot(engine)
    before = await everything(sql)
    kid, digest = at.token.kid, at.digest
    for name, forge in FORGED.items():
        assert await refused(engine, at, forge(kid, digest)) == "invalid_token", name
        assert await refused(engine, at, WaitpointToken(forge(kid, digest))) == "invalid_token", name
    assert await everything(sql) == before
    await accepted(engine, at)


async def test_one_wrong_digit_anywhere_is_enough(plain_engine: ff.Engine) -> None:
    at = await spot(plain_engine)
    for place, digit in enumerate(at.digest):
        other = "0123456789abcdef"[(int(digit, 16) + 1) % 16]
        forged = f"{at.token.kid}:{at.digest[:place]}{other}{at.digest[place + 1 :]}"
        assert await refused(plain_engine, at, forged) == "invalid_token", place


async def test_no_token_at_all_is_missing(engine: ff.Engine, sql: asyncpg.Connection[Any]) -> None:
    at = await spot(engine)
    assert await refused(engine, at, "") == "missing_token"
    assert await refused(engine, at, WaitpointToken("")) == "missing_token"
    # Also where nothing is known, so that it says nothing.
    assert await refused(engine, at, "", execution_id=id_in(3)) == "missing_token"
    assert await refused(engine, at, "", waitpoint_id=new_id()) == "missing_token"
    assert await sql.fetchval("select flowfabric.check_token(7, $1, $2, null)", at.id, at.waitpoint_id) == (
        "missing_token"
    )


async def test_a_token_that_is_not_text_is_refused(engine: ff.Engine) -> None:
    at = await spot(engine)
    for token in (5, at.text.encode(), [at.text], object()):
        with pytest.raises(ff.InvalidInput, match="waitpoint_token"):
            await deliver(engine, at, token)


async def test_every_unknown_token_gets_the_same_refusal(engine: CheckedEngine, sql: asyncpg.Connection[Any]) -> None:
    await rotate(engine, "a", A)
    old = await spot(engine)
    await rotate(engine, "b", B)
    at = await spot(engine, old.claimed)
    sibling = await spot(engine, old.claimed)
    neighbour = await spot(engine)  # another execution of the same partition
    stranger = await spot(engine, partition=8)
    nobody, nowhere = id_in(7), new_id()
    mirrored = id_in(8, at.id)

    cases: dict[str, tuple[str, ff.ExecutionId, UUID]] = {
        "wrong digest": (f"b:{'0' * 64}", at.id, at.waitpoint_id),
        "wrong kid": (f"a:{at.digest}", at.id, at.waitpoint_id),
        "another kid's good signature": (signed("a", A, at.id, at.waitpoint_id), at.id, at.waitpoint_id),
        "the new kid on an old waitpoint": (
            signed("b", B, old.id, old.waitpoint_id), old.id, old.waitpoint_id,
        ),
        "unknown kid": (f"nobody:{at.digest}", at.id, at.waitpoint_id),
        "sibling's token": (sibling.text, at.id, at.waitpoint_id),
        "sibling's waitpoint": (at.text, at.id, sibling.waitpoint_id),
        "neighbour's token": (neighbour.text, at.id, at.waitpoint_id),
        "neighbour's execution": (at.text, neighbour.id, at.waitpoint_id),
        "neighbour's waitpoint": (neighbour.text, at.id, neighbour.waitpoint_id),
        "stranger's token": (stranger.text, at.id, at.waitpoint_id),
        "stranger's waitpoint": (stranger.text, at.id, stranger.waitpoint_id),
        "unknown execution": (at.text, nobody, at.waitpoint_id),
        "unknown execution, signed": (signed("b", B, nobody, at.waitpoint_id), nobody, at.waitpoint_id),
        "unknown waitpoint": (at.text, at.id, nowhere),
        "unknown waitpoint, signed": (signed("b", B, at.id, nowhere), at.id, nowhere),
        "another partition": (at.text, mirrored, at.waitpoint_id),
        "another partition, signed": (signed("b", B, mirrored, at.waitpoint_id), mirrored, at.waitpoint_id),
        "neighbour's waitpoint, signed": (
            signed("b", B, at.id, neighbour.waitpoint_id), at.id, neighbour.waitpoint_id,
        ),
        "signed without the braces": (
            signed("b", B, str(at.id), at.waitpoint_id), at.id, at.waitpoint_id,
        ),
    }  # fmt: skip
    before = await everything(sql)
    answers = {}
    for name, (token, execution_id, waitpoint_id) in cases.items():
        with pytest.raises(ValidationFailed) as error:
            await deliver(engine, at, token, execution_id=execution_id, waitpoint_id=waitpoint_id)
        told = error.value
        answers[name] = (type(told), told.kind, told.detail, str(told), repr(told), told.http_status, told.code)
        assert told.execution_id == execution_id
    assert len(set(answers.values())) == 1, answers
    assert next(iter(answers.values()))[2] == "invalid_token"
    assert await everything(sql) == before
    for one in (old, at, sibling, neighbour, stranger):
        await accepted(engine, one)


async def test_the_dummy_key_for_an_unknown_one_verifies_nothing(
    engine: CheckedEngine, sql: asyncpg.Connection[Any], still: Clock
) -> None:
    """Where a key is missing a digest is computed all the same, with a key that is no secret."""
    at = await spot(engine)
    nothing = ("", "00" * 32, "00" * 64)
    for secret in nothing:
        for kid, waitpoint_id in (("nobody", at.waitpoint_id), ("k1", new_id()), ("k1", at.waitpoint_id)):
            token = signed(kid, secret, at.id, waitpoint_id)
            assert await refused(engine, at, token, waitpoint_id=waitpoint_id) == "invalid_token"
    await rotate(engine, "a", A, timedelta(0))
    await advance(still, TICK)
    assert await rotate(engine, "b", B) == Rotated("a", "b", 1)
    for secret in nothing:
        assert await refused(engine, at, signed("k1", secret, at.id, at.waitpoint_id)) == "invalid_token"
    await empty_keystore(sql)
    for secret in nothing:
        assert await refused(engine, at, signed("k1", secret, at.id, at.waitpoint_id)) == "invalid_token"


async def test_a_claim_grant_is_no_token_and_a_token_is_no_claim_grant(engine: CheckedEngine) -> None:
    at = await spot(engine)
    waiting = await submit(engine)
    grant = await engine.issue_claim_grant(waiting, **WORKER)
    digest = grant.grant_key.rpartition(":")[2]
    assert len(digest) == 64
    for token in (grant.grant_key, f"k1:{digest}", f"pg:{digest}"):
        assert await refused(engine, at, token) == "invalid_token"
        assert await refused(engine, at, token, execution_id=waiting) == "invalid_token"
    forged = grant.grant_key[:-64] + at.digest
    assert await engine.verify_grant(waiting, forged) != "ok"
    assert await engine.verify_grant(waiting, at.text) != "ok"
    assert await engine.verify_grant(waiting, grant.grant_key) == "ok"


async def test_a_waitpoint_id_is_never_used_again(engine: CheckedEngine) -> None:
    at = await spot(engine)
    await engine.close_waitpoint(at.claimed.handle, at.waitpoint_id)
    for claimed in (at.claimed, await hold(engine), await hold(engine, partition=8)):
        with pytest.raises(Conflict) as error:
            await engine.suspend(claimed.handle, waitpoints=[Fresh(at.waitpoint_id, "k")], resume_condition=on("k"))
        assert error.value.kind == "waitpoint_already_exists"
        if claimed is not at.claimed:
            assert await refused(engine, at, execution_id=claimed.execution_id) == "invalid_token"


# Authenticate first


async def _closed(engine: ff.Engine, at: Spot) -> None:
    await engine.close_waitpoint(at.claimed.handle, at.waitpoint_id)


async def _ended(engine: ff.Engine, at: Spot) -> None:
    await engine.complete(at.claimed.handle)


async def _signalled(engine: ff.Engine, at: Spot) -> None:
    await deliver(engine, at, signal_id=UUID(int=1), idempotency_key="once")


async def _nothing(engine: ff.Engine, at: Spot) -> None:
    pass


FIRST: dict[str, tuple[Callable[[ff.Engine, Spot], Awaitable[None]], dict[str, Any], Any]] = {
    "closed": (_closed, {}, "waitpoint_closed"),
    "ended": (_ended, {}, "target_not_signalable"),
    "the same signal": (_signalled, {"signal_id": UUID(int=1)}, DuplicateSignal(UUID(int=1))),
    "the same key": (_signalled, {"idempotency_key": "once"}, DuplicateSignal(UUID(int=1))),
    "too large": (_nothing, {"payload": bytes(65_537)}, "payload_too_large"),
    "too many": (_signalled, {"max_signals_per_execution": 1}, "signal_limit_exceeded"),
}


async def test_nothing_is_revealed_before_the_token_is_verified(engine: CheckedEngine, still: Clock) -> None:
    await rotate(engine, "a", A, GRACE)
    spots = {}
    for case, (prepare, fields, answer) in FIRST.items():
        at = spots[case] = await spot(engine)
        await prepare(engine, at)
        for token, detail in (("", "missing_token"), ("rubbish", "invalid_token"), (f"a:{'0' * 64}", "invalid_token")):
            assert await refused(engine, at, token, **fields) == detail, case
        try:
            assert await deliver(engine, at, **fields) == answer, case
        except ff.FlowFabricError as error:
            assert error.kind == answer, case
    await rotate(engine, "b", B, timedelta(0))
    await advance(still, TICK)
    for case, at in spots.items():
        assert await refused(engine, at, **FIRST[case][1]) == "token_expired", case


async def test_the_shape_of_a_signal_comes_before_its_token(engine: ff.Engine) -> None:
    at = await spot(engine)
    for fields in ({"signal_name": ""}, {"signal_name": "__x"}, {"source_type": "system"}):
        with pytest.raises(ff.InvalidInput):
            await deliver(engine, at, "rubbish", **fields)


async def test_a_used_token_does_nothing_twice(engine: CheckedEngine) -> None:
    at = await spot(engine)
    await engine.suspend(at.claimed.handle, waitpoints=[UsePending(at.waitpoint_id)], resume_condition=on("k"))
    first = await deliver(engine, at, idempotency_key="once")
    assert isinstance(first, Accepted) and first.effect == "resume_condition_satisfied"
    assert await deliver(engine, at, idempotency_key="once") == DuplicateSignal(first.signal_id)
    assert await deliver(engine, at, signal_id=first.signal_id) == DuplicateSignal(first.signal_id)
    with pytest.raises(StateError) as late:
        await deliver(engine, at)
    assert late.value.kind == "waitpoint_closed"
    assert (await engine.list_pending_waitpoints(at.id)).items == []
    assert await engine.read_waitpoint_token(home(at.id), at.waitpoint_id) is None


# Rotation and grace


async def test_a_kid_verifies_through_the_last_instant_of_its_grace(
    engine: CheckedEngine, still: Clock, sql: asyncpg.Connection[Any]
) -> None:
    await rotate(engine, "a", A)
    at = await spot(engine)
    assert await rotate(engine, "b", B, GRACE) == Rotated("a", "b", 0)
    ends = await still.now() + GRACE
    assert await engine.list_waitpoint_hmac_kids() == WaitpointKids(
        "b", (VerifyingKid("a", ends), VerifyingKid("k1", ends - GRACE + HOUR))
    )
    await advance(still, GRACE)
    await accepted(engine, at)
    assert [one.kid for one in (await engine.list_waitpoint_hmac_kids()).verifying] == ["a", "k1"]
    await advance(still, TICK)
    assert await refused(engine, at) == "token_expired"
    assert [one.kid for one in (await engine.list_waitpoint_hmac_kids()).verifying] == ["k1"]
    # A sender without the right token does not learn that the key has expired.
    assert await refused(engine, at, f"a:{'0' * 64}") == "invalid_token"
    sibling = await spot(engine, at.claimed)
    assert await refused(engine, sibling, at.text) == "invalid_token"
    assert await refused(engine, at, waitpoint_id=sibling.waitpoint_id) == "invalid_token"
    assert await refused(engine, at, execution_id=id_in(7)) == "invalid_token"


@pytest.mark.parametrize("how", ["rotation", "sweep"])
async def test_a_purge_takes_no_kid_that_still_verifies(
    engine: CheckedEngine, still: Clock, sql: asyncpg.Connection[Any], how: str
) -> None:
    await rotate(engine, "a", A)
    at = await spot(engine)
    await rotate(engine, "b", B, GRACE)

    async def purge(kid: str) -> int:
        if how == "sweep":
            return (await engine.sweep()).total
        answer = await rotate(engine, kid, C)
        assert isinstance(answer, Rotated)
        return answer.gc_count

    await advance(still, GRACE)
    assert await purge("c") == 0
    await accepted(engine, at)
    await advance(still, TICK)
    assert await refused(engine, at) == "token_expired"
    assert await purge("d") == 1
    assert await refused(engine, at) == "invalid_token"
    row = await sql.fetchrow("select * from flowfabric.keystore where kid = 'a'")
    assert row is not None
    assert (row["state"], row["inner_key"], row["outer_key"], row["expires_at"]) == ("retired", None, None, None)
    assert await purge("e") == 0


async def test_no_grace_is_a_grace_of_one_instant(engine: CheckedEngine, still: Clock) -> None:
    at = await spot(engine)
    assert await rotate(engine, "a", A, timedelta(0)) == Rotated("k1", "a", 0)
    await accepted(engine, at)
    await advance(still, TICK)
    assert await refused(engine, at) == "token_expired"


async def test_every_kid_keeps_its_own_grace(engine: CheckedEngine, still: Clock) -> None:
    start = await still.now()
    await rotate(engine, "a", A)
    of_a = await spot(engine)
    await rotate(engine, "b", B, timedelta(seconds=100))
    of_b = await spot(engine)
    await rotate(engine, "c", C, timedelta(seconds=50))
    of_c = await spot(engine)
    for at in (of_a, of_b, of_c):
        await accepted(engine, at)
    kids = await engine.list_waitpoint_hmac_kids()
    assert kids == WaitpointKids(
        "c",
        (
            VerifyingKid("b", start + timedelta(seconds=50)),
            VerifyingKid("a", start + timedelta(seconds=100)),
            VerifyingKid("k1", start + HOUR),
        ),
    )
    await still.advance(seconds=60)
    await accepted(engine, of_a)
    assert await refused(engine, of_b) == "token_expired"
    await accepted(engine, of_c)
    assert [one.kid for one in (await engine.list_waitpoint_hmac_kids()).verifying] == ["a", "k1"]
    await still.advance(days=100)
    assert await refused(engine, of_a) == "token_expired"
    await accepted(engine, of_c)


async def test_the_grace_is_a_day_unless_said_otherwise(engine: CheckedEngine, still: Clock) -> None:
    await engine.rotate_waitpoint_hmac_secret_all("a", A)
    (kid,) = (await engine.list_waitpoint_hmac_kids()).verifying
    assert kid.expires_at - await still.now() == timedelta(milliseconds=86_400_000)


async def test_a_rotation_signs_no_old_waitpoint_again(engine: CheckedEngine, still: Clock) -> None:
    await rotate(engine, "a", A)
    at = await spot(engine)
    await rotate(engine, "b", B, GRACE)
    partition = home(at.id)
    assert await engine.read_waitpoint_token(partition, at.waitpoint_id) == at.token
    (listed,) = (await engine.list_pending_waitpoints(at.id)).items
    assert (listed.token_kid, listed.token_fingerprint) == ("a", hashlib.sha256(at.digest.encode()).hexdigest()[:16])
    answer = await engine.suspend(
        at.claimed.handle, waitpoints=[UsePending(at.waitpoint_id)], resume_condition=all_of("k", OperatorOnly())
    )
    assert isinstance(answer, Suspended) and answer.details.waitpoint_token == at.token
    await accepted(engine, at)
    # Once its key is erased there is no token any more; operators still get through.
    await advance(still, GRACE + TICK)
    await rotate(engine, "c", C)
    assert await engine.read_waitpoint_token(partition, at.waitpoint_id) is None
    (listed,) = (await engine.list_pending_waitpoints(at.id)).items
    assert (listed.token_kid, listed.token_fingerprint) == ("a", "")
    assert await engine.probe_waitpoint(at.id, at.waitpoint_id, at.token) == "mismatch"
    approval = await engine.deliver_approval_signal(
        at.id, "default", at.waitpoint_id, signal_name="approved", idempotency_suffix="1"
    )
    assert isinstance(approval, Accepted)


async def test_a_pending_waitpoint_of_an_erased_key_can_still_be_used(engine: CheckedEngine, still: Clock) -> None:
    at = await spot(engine)
    await rotate(engine, "a", A, timedelta(0))
    await advance(still, TICK)
    await rotate(engine, "b", B)
    for _ in range(2):
        answer = await engine.suspend(
            at.claimed.handle,
            waitpoints=[UsePending(at.waitpoint_id)],
            resume_condition=OperatorOnly(),
            idempotency_key="once",
        )
        assert isinstance(answer, Suspended)
        assert str(answer.details.waitpoint_token) == "<REDACTED:malformed>"
        assert await refused(engine, at, answer.details.waitpoint_token) in ("missing_token", "invalid_token")
    assert await refused(engine, at) == "invalid_token"


# Seeding and rotating in every situation. The keystore holds cur (A), ver (B), old (C, past its grace), gone (retired).


@pytest_asyncio.fixture(loop_scope="session")
async def stocked(sql: asyncpg.Connection[Any], still: Clock) -> Clock:
    await empty_keystore(sql)
    now = await still.now()
    await install(sql, "cur", A, "current")
    await install(sql, "ver", B, "verifying", now + HOUR)
    await install(sql, "old", C, "verifying", now - TICK)
    await install(sql, "gone", None, "retired")
    return still


SEEDS: dict[str, tuple[str, str, Any]] = {
    "current, same secret": ("cur", A, AlreadySeeded("cur", True)),
    "current, same secret in capitals": ("cur", A.upper(), AlreadySeeded("cur", True)),
    "current, other secret": ("cur", B, AlreadySeeded("cur", False)),
    "verifying, same secret": ("ver", B, AlreadySeeded("ver", True)),
    "verifying, other secret": ("ver", A, AlreadySeeded("ver", False)),
    "verifying no more, same secret": ("old", C, AlreadySeeded("old", True)),
    "retired": ("gone", A, "InvalidInput"),
    "unused": ("new", A, "InvalidInput"),
}


async def test_seeding_never_replaces_a_key(
    engine: CheckedEngine, stocked: Clock, sql: asyncpg.Connection[Any]
) -> None:
    before = await everything(sql)
    for case, (kid, secret, answer) in SEEDS.items():
        if answer == "InvalidInput":
            with pytest.raises(ff.InvalidInput, match="rotate_waitpoint_hmac_secret_all") as error:
                await engine.seed_waitpoint_hmac_secret(kid, secret)
            assert secret not in str(error.value)
        else:
            assert await engine.seed_waitpoint_hmac_secret(kid, secret) == answer, case
        assert await everything(sql) == before, case


async def test_seeding_installs_where_no_key_signs(engine: CheckedEngine, sql: asyncpg.Connection[Any]) -> None:
    await empty_keystore(sql)
    assert await engine.seed_waitpoint_hmac_secret("a", A) == Seeded("a")
    assert await engine.seed_waitpoint_hmac_secret("a", A) == AlreadySeeded("a", True)
    assert await engine.list_waitpoint_hmac_kids() == WaitpointKids("a", ())
    at = await spot(engine)
    assert at.text == signed("a", A, at.id, at.waitpoint_id)
    await accepted(engine, at)


async def test_seeding_where_keys_verify_but_none_signs(
    engine: CheckedEngine, stocked: Clock, sql: asyncpg.Connection[Any]
) -> None:
    await sql.execute("delete from flowfabric.keystore where kid = 'cur'")
    before = await everything(sql)
    with pytest.raises(ff.InvalidInput):
        await engine.seed_waitpoint_hmac_secret("gone", A)
    assert await engine.seed_waitpoint_hmac_secret("ver", B) == AlreadySeeded("ver", True)
    assert await everything(sql) == before
    assert await engine.seed_waitpoint_hmac_secret("new", A) == Seeded("new")
    assert await states(sql) == {"new": "current", "ver": "verifying", "old": "verifying", "gone": "retired"}


@pytest.mark.both_servers
async def test_migrating_again_seeds_nothing_more(engine: CheckedEngine, database: str, stocked: Clock) -> None:
    before = await engine.list_waitpoint_hmac_kids()
    await migrate_database(database)
    assert await engine.list_waitpoint_hmac_kids() == before


ROTATIONS: dict[str, tuple[str, str, Any]] = {
    "current, same secret": ("cur", A, RotationNoop("cur")),
    "current, same secret in capitals": ("cur", A.upper(), RotationNoop("cur")),
    "current, other secret": ("cur", B, "conflict"),
    "verifying, same secret": ("ver", B, "conflict"),
    "verifying, other secret": ("ver", C, "conflict"),
    "verifying no more, same secret": ("old", C, "conflict"),
    "retired": ("gone", C, "conflict"),
}


async def test_a_kid_signs_once_and_is_never_overwritten(
    engine: CheckedEngine, stocked: Clock, sql: asyncpg.Connection[Any]
) -> None:
    before = await everything(sql)
    for case, (kid, secret, answer) in ROTATIONS.items():
        result = await rotate(engine, kid, secret, GRACE)
        if answer == "conflict":
            assert isinstance(result, Conflict) and result.kind == "rotation_conflict", case
            assert kid in str(result) and secret not in str(result)
        else:
            assert result == answer, case
        assert await everything(sql) == before, case

    assert await rotate(engine, "new", A, GRACE) == Rotated("cur", "new", 1)
    assert await states(sql) == {
        "new": "current", "cur": "verifying", "ver": "verifying", "old": "retired", "gone": "retired",
    }  # fmt: skip
    now = await stocked.now()
    assert await engine.list_waitpoint_hmac_kids() == WaitpointKids(
        "new", (VerifyingKid("cur", now + GRACE), VerifyingKid("ver", now + HOUR))
    )


async def test_the_first_rotation_has_no_key_before_it(engine: CheckedEngine, sql: asyncpg.Connection[Any]) -> None:
    await empty_keystore(sql)
    assert await rotate(engine, "a", A) == Rotated(None, "a", 0)
    assert await engine.list_waitpoint_hmac_kids() == WaitpointKids("a", ())


async def test_a_rotation_repeated_after_a_lost_response_changes_nothing(
    engine: CheckedEngine, still: Clock, sql: asyncpg.Connection[Any]
) -> None:
    await rotate(engine, "a", A, GRACE)
    before = await everything(sql)
    await still.advance(seconds=5)
    for grace in (timedelta(0), GRACE, timedelta(days=365)):
        assert await rotate(engine, "a", A, grace) == RotationNoop("a")
    assert (await everything(sql)).replace("00:00:05", "00:00:00") == before, "only the clock has moved"


async def test_any_grace_of_the_contract_is_taken(engine: CheckedEngine, still: Clock) -> None:
    before = "k1"
    for n, ms in enumerate((2**53 - 1, 1, 0)):
        at = await spot(engine)
        assert await rotate(engine, f"g{n}", A, timedelta(milliseconds=ms)) == Rotated(before, f"g{n}", 0)
        before = f"g{n}"
        await advance(still, timedelta(milliseconds=min(ms, 1000)))
        await accepted(engine, at)
        if ms < 1000:
            await advance(still, TICK)
            assert await refused(engine, at) == "token_expired"
            await engine.sweep()
    assert [one.kid for one in (await engine.list_waitpoint_hmac_kids()).verifying] == ["k1"], "for ever and a day"


BAD_KIDS: list[Any] = [
    "", "a:b", ":", "a b", " a", "a\n", "a\t", "\0", "\x7f", "é", "\u200b", "\ud800", "k" * 65, None, 5, b"kid",
    ["kid"],
]  # fmt: skip
BAD_SECRETS: list[Any] = [
    "", "ab", "ab" * 31, "ab" * 33, "ab" * 31 + "a", "ab" * 31 + "ag", " " + "ab" * 32, "ab" * 32 + "\n",
    "0x" + "ab" * 31, "\uff10" * 64, "\u0661" * 64, None, 5, bytes(32), b"ab" * 32,
]  # fmt: skip
BAD_GRACES: list[Any] = [
    timedelta(microseconds=-1), timedelta(-1), timedelta(milliseconds=2**53), timedelta.max, timedelta.min, None, 5, 0,
    86_400_000, 1.5, "5", True,
]  # fmt: skip


async def test_bad_kids_secrets_and_graces_are_refused_by_name_and_change_nothing(
    engine: CheckedEngine, sql: asyncpg.Connection[Any]
) -> None:
    before = await everything(sql)
    for kind, bad, call in (
        ("invalid_kid", BAD_KIDS, lambda value: engine.seed_waitpoint_hmac_secret(value, A)),
        ("invalid_kid", BAD_KIDS, lambda value: engine.rotate_waitpoint_hmac_secret_all(value, A, GRACE)),
        ("invalid_secret_hex", BAD_SECRETS, lambda value: engine.seed_waitpoint_hmac_secret("a", value)),
        ("invalid_secret_hex", BAD_SECRETS, lambda value: engine.rotate_waitpoint_hmac_secret_all("a", value, GRACE)),
        ("invalid_grace_ms", BAD_GRACES, lambda value: engine.rotate_waitpoint_hmac_secret_all("a", A, value)),
    ):
        for value in bad:
            with pytest.raises(ValidationFailed) as error:
                await call(value)
            assert error.value.kind == kind, value
            if isinstance(value, str) and len(value) > 10:
                assert value not in str(error.value) and value not in repr(error.value)
    # The other way round the secret is a legal kid, and still shows nowhere.
    with pytest.raises(ValidationFailed) as error:
        await engine.seed_waitpoint_hmac_secret(SECRET, "kid")
    assert SECRET not in str(error.value)
    assert await everything(sql) == before


# At the same time


@pytest_asyncio.fixture(loop_scope="session")
async def pair(database: str) -> AsyncIterator[tuple[ff.Engine, ff.Engine]]:
    async with await ff.Engine.connect(database) as one, await ff.Engine.connect(database) as two:
        yield one, two
        assert await one.audit(events=True) == []


async def together(calls: list[Awaitable[Any]]) -> list[Any]:
    async with asyncio.timeout(PATIENCE):
        return list(await asyncio.gather(*calls, return_exceptions=True))


async def test_of_seeds_at_the_same_time_one_installs(
    pair: tuple[ff.Engine, ff.Engine], sql: asyncpg.Connection[Any]
) -> None:
    await empty_keystore(sql)
    answers = await together([pair[n % 2].seed_waitpoint_hmac_secret(f"s{n}", A) for n in range(8)])
    assert sorted(type(answer).__name__ for answer in answers) == ["InvalidInput"] * 7 + ["Seeded"]
    assert list((await states(sql)).values()) == ["current"]


async def test_the_same_seed_at_the_same_time_is_seeded_once(
    pair: tuple[ff.Engine, ff.Engine], sql: asyncpg.Connection[Any]
) -> None:
    await empty_keystore(sql)
    answers = await together([pair[n % 2].seed_waitpoint_hmac_secret("s", A if n < 4 else B) for n in range(8)])
    (seeded,) = [answer for answer in answers if isinstance(answer, Seeded)]
    assert seeded == Seeded("s")
    same = [answer.same_secret for answer in answers if isinstance(answer, AlreadySeeded)]
    assert sorted(same) == [False] * 4 + [True] * 3


async def test_concurrent_rotations_run_one_after_the_other(
    pair: tuple[ff.Engine, ff.Engine], sql: asyncpg.Connection[Any]
) -> None:
    answers = await together([rotate(pair[n % 2], f"r{n}", f"{n:064x}") for n in range(8)])
    assert all(isinstance(answer, Rotated) for answer in answers), answers
    before = {answer.previous_kid: answer.new_kid for answer in answers}
    kid, chain = "k1", []
    while kid in before:
        kid = before[kid]
        chain.append(kid)
    assert sorted(chain) == [f"r{n}" for n in range(8)]
    found = await states(sql)
    assert [kid for kid, state in found.items() if state == "current"] == [chain[-1]]
    assert sorted(found.values()) == ["current"] + ["verifying"] * 8


async def test_one_kid_with_two_secrets_at_the_same_time_is_one_key(
    pair: tuple[ff.Engine, ff.Engine], sql: asyncpg.Connection[Any]
) -> None:
    answers = await together([rotate(pair[n % 2], "r", A if n < 4 else B) for n in range(8)])
    counted = sorted(type(answer).__name__ for answer in answers)
    assert counted == ["Conflict"] * 4 + ["Rotated"] + ["RotationNoop"] * 3
    assert await states(sql) == {"r": "current", "k1": "verifying"}


async def test_seeds_and_rotations_at_the_same_time_leave_one_key_that_signs(
    pair: tuple[ff.Engine, ff.Engine], sql: asyncpg.Connection[Any]
) -> None:
    await empty_keystore(sql)
    one, two = pair
    calls: list[Awaitable[Any]] = []
    for n in range(4):
        calls += [one.seed_waitpoint_hmac_secret(f"s{n}", A), rotate(two, f"r{n}", B)]
    answers = await together(calls)
    assert sum(isinstance(answer, Rotated) for answer in answers) == 4
    assert sum(isinstance(answer, Seeded) for answer in answers) <= 1
    assert list((await states(sql)).values()).count("current") == 1


async def test_tokens_minted_during_rotations_verify(pair: tuple[ff.Engine, ff.Engine]) -> None:
    one, two = pair
    held = [await hold(one) for _ in range(6)]
    calls: list[Awaitable[Any]] = []
    for n, claimed in enumerate(held):
        calls += [spot(one, claimed), rotate(two, f"r{n}", f"{n:064x}")]
    answers = await together(calls)
    spots = [answer for answer in answers if isinstance(answer, Spot)]
    assert len(spots) == 6, answers
    for at in spots:
        await accepted(one, at)


# The stamp


async def test_a_refused_token_is_noted_once_a_second_at_most(
    engine: CheckedEngine, still: Clock, sql: asyncpg.Connection[Any]
) -> None:
    at = await spot(engine)
    other = await spot(engine)
    assert await stamp(engine, at.id) is None
    first = await still.now()
    before = await everything(sql)
    await refused(engine, at, "rubbish")
    assert await stamp(engine, at.id) == first
    for token in ("", f"k1:{'0' * 64}", other.text):
        await advance(still, timedelta(milliseconds=333))
        await refused(engine, at, token)
        assert await stamp(engine, at.id) == first
    await advance(still, timedelta(milliseconds=1))
    await refused(engine, at, waitpoint_id=other.waitpoint_id)
    assert await stamp(engine, at.id) == first + timedelta(seconds=1)
    assert await stamp(engine, other.id) is None
    await sql.execute("update flowfabric.clock set shift = '0'")
    assert await everything(sql) == before, "nothing else was written"
    await accepted(engine, at)
    assert await stamp(engine, at.id) == first + timedelta(seconds=1)


async def test_an_expired_token_is_noted_too_and_a_missing_execution_is_not(
    engine: CheckedEngine, still: Clock, sql: asyncpg.Connection[Any]
) -> None:
    at = await spot(engine)
    await rotate(engine, "a", A, timedelta(0))
    await advance(still, TICK)
    assert await refused(engine, at) == "token_expired"
    assert await stamp(engine, at.id) == await still.now()
    await refused(engine, at, execution_id=id_in(7))
    assert await sql.fetchval("select count(*) from flowfabric.execution") == 1


async def test_a_refusal_waits_for_no_lock(engine: CheckedEngine, database: str, sql: asyncpg.Connection[Any]) -> None:
    at = await spot(engine)
    await engine.suspend(at.claimed.handle, waitpoints=[UsePending(at.waitpoint_id)], resume_condition=on("k"))
    async with sql.transaction():
        await sql.execute("select from flowfabric.execution for update")
        await sql.execute("select from flowfabric.waitpoint for update")
        await sql.execute("select from flowfabric.suspension for update")
        await sql.execute("select from flowfabric.keystore for update")
        async with asyncio.timeout(PATIENCE):
            for token in ("", "rubbish", f"k1:{'0' * 64}"):
                assert await refused(engine, at, token) in ("missing_token", "invalid_token")
        assert await sql.fetchval("select hmac_failed_at from flowfabric.execution") is None
    assert await stamp(engine, at.id) is None, "it was skipped, not queued"
    await refused(engine, at, "rubbish")
    assert await stamp(engine, at.id) is not None
    # Keys can be changed while an execution is locked, and a key held by a rotation stops no delivery.
    async with sql.transaction():
        await sql.execute("select from flowfabric.execution for update")
        async with asyncio.timeout(PATIENCE):
            await rotate(engine, "a", A)
    async with sql.transaction():
        await sql.execute("select flowfabric.hold_keystore()")
        await sql.execute("update flowfabric.keystore set installed_at = installed_at")
        async with asyncio.timeout(PATIENCE):
            await accepted(engine, at)


# Anything


ANYTHING = st.text(st.characters(codec=None, categories=None), max_size=150)
TOKENISH = st.from_regex(r"[a-z0-9:]{0,8}:?[0-9a-fA-F]{60,68}[:\n ]?", fullmatch=True)
BYTES = st.binary(max_size=150).map(lambda raw: raw.decode("latin-1"))
FUZZ = settings(
    max_examples=sampling.examples(150, 40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    derandomize=True,
)


@pytest_asyncio.fixture(loop_scope="session")
async def target(plain_engine: ff.Engine) -> AsyncIterator[Spot]:
    """One waitpoint for all examples; in the end its token still is its token."""
    at = await spot(plain_engine)
    yield at
    await accepted(plain_engine, at)


@FUZZ
@given(text=ANYTHING | TOKENISH | BYTES, cut=st.integers(0, 67), keep=st.booleans())
async def test_no_text_but_the_token_is_the_token(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any], target: Spot, text: str, cut: int, keep: bool
) -> None:
    before = await everything(sql)
    spliced = target.text[:cut] + text + (target.text[cut:] if keep else "")
    for token in (text, f"k1:{text}", f"{text}:{target.digest}", spliced):
        if token == target.text:
            continue
        answer = "missing_token" if token == "" else "invalid_token"
        assert await refused(plain_engine, target, token) == answer
        if "\0" not in token and token.isprintable():  # what the database can be asked
            at = (home(target.id), target.id, target.waitpoint_id)
            assert await sql.fetchval("select flowfabric.check_token($1, $2, $3, $4)", *at, token) == answer
    assert await everything(sql) == before


@given(text=ANYTHING | TOKENISH | BYTES, digest=st.binary(min_size=32, max_size=32))
def test_no_token_prints_itself(text: str, digest: bytes) -> None:
    for token in (
        WaitpointToken(text),
        WaitpointToken(f"kid:{digest.hex()}"),
        WaitpointToken(f"{text}:{digest.hex()}"),
    ):
        for shown in (str(token), repr(token), f"{token}", f"{token!r:>10}", "%s" % token, str([token])):  # noqa: UP031
            assert "REDACTED" in shown and digest.hex() not in shown
        assert token == WaitpointToken(token.reveal()) and hash(token) == hash(WaitpointToken(token.reveal()))
        assert token != token.reveal() and copy.copy(token) == token == pickle.loads(pickle.dumps(token))
    assert WaitpointToken(text + "x") != WaitpointToken(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("kid-1:" + "ab" * 32, "kid-1:<REDACTED:len=64>"),
        ("kid-1:abc", "kid-1:<REDACTED:len=3>"),
        ("", "<REDACTED:malformed>"),
        (":", "<REDACTED:malformed>"),
        ("ab" * 32, "<REDACTED:malformed>"),
        (":" + "ab" * 32, "<REDACTED:malformed>"),
        ("kid-1:", "<REDACTED:malformed>"),
        ("ab" * 32 + ":kid-1", "<REDACTED:malformed>"),
        ("two words:" + "ab" * 32, "<REDACTED:malformed>"),
        ("k" * 65 + ":" + "ab" * 32, "<REDACTED:malformed>"),
    ],
)
def test_a_token_is_printed_by_its_kid_and_length(text: str, shown: str) -> None:
    assert (str(WaitpointToken(text)), repr(WaitpointToken(text))) == (shown, f"WaitpointToken({shown})")


# What never shows


async def test_nothing_secret_is_printed_raised_logged_or_stored(
    engine: CheckedEngine, sql: asyncpg.Connection[Any], still: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    heard: list[str] = []
    told: list[str] = []
    sql.add_log_listener(lambda _, message: heard.append(str(message)))

    def shows(*values: Any) -> None:
        told.extend(text for value in values for text in (str(value), repr(value)))

    async def fails(call: Awaitable[Any]) -> None:
        with pytest.raises(ff.FlowFabricError) as error:
            await call
        shows(error.value, error.value.__dict__, error.value.args)
        told.extend(traceback.format_exception(error.value))

    shows(await engine.seed_waitpoint_hmac_secret("k1", A))
    shows(await engine.rotate_waitpoint_hmac_secret_all("a", A, HOUR))
    shows(await engine.rotate_waitpoint_hmac_secret_all("a", B, HOUR))
    await fails(engine.seed_waitpoint_hmac_secret("b", B))
    await fails(engine.seed_waitpoint_hmac_secret(C, "c"))
    await fails(engine.rotate_waitpoint_hmac_secret_all("c c", C, HOUR))

    claimed = await hold(engine)
    made = await engine.create_waitpoint(claimed.handle, "k", HOUR)
    at = Spot(claimed, made.waitpoint_id, made.token)
    gone = await spot(engine, claimed)
    other = await hold(engine)
    bound = await engine.suspend(
        other.handle,
        waitpoints=[Fresh(new_id(), "a"), Fresh(new_id(), "b")],
        resume_condition=all_of("a", "b"),
        idempotency_key="once",
    )
    assert isinstance(bound, Suspended)
    again = await engine.suspend(
        other.handle,
        waitpoints=[Fresh(new_id(), "a"), Fresh(new_id(), "b")],
        resume_condition=all_of("a", "b"),
        idempotency_key="once",
    )
    assert again == bound
    tokens = [
        at.text, gone.text, bound.details.waitpoint_token.reveal(),
        bound.details.additional_waitpoints[0].waitpoint_token.reveal(),
    ]  # fmt: skip
    secrets = [*(token.partition(":")[2] for token in tokens), A, B, C]
    assert all(len(secret) == 64 for secret in secrets) and len(set(secrets)) == 7

    await fails(deliver(engine, at, gone.text))
    await fails(deliver(engine, gone, at.text))
    await fails(deliver(engine, at, at.text.upper()))
    await fails(deliver(engine, at, at.text + "0"))
    await fails(deliver(engine, at, at.text, execution_id=other.execution_id))
    await fails(deliver(engine, at, at.digest))
    await fails(deliver(engine, at, at.text.encode()))
    await fails(deliver(engine, at, [at.text]))
    await fails(deliver(engine, at, payload=bytes(65_537)))
    await engine.close_waitpoint(claimed.handle, gone.waitpoint_id)
    await fails(deliver(engine, gone))
    shows(await deliver(engine, at, idempotency_key="d"), await deliver(engine, at, idempotency_key="d"))
    partition = home(at.id)
    shows(
        made, bound, again, bound.details.additional_waitpoints,
        await engine.probe_waitpoint(at.id, at.waitpoint_id, "x"),
        await engine.read_waitpoint_token(partition, at.waitpoint_id),
    )  # fmt: skip
    for one in (at.id, other.execution_id):
        shows(
            await engine.list_pending_waitpoints(one), await engine.read_suspension(one),
            await engine.read_signals(one),
            await engine.read_execution(one), await engine.describe_execution(one), await engine.list_attempts(one),
        )  # fmt: skip
    shows(await engine.list_waits(), await engine.list_suspended(partition), await engine.list_waitpoint_hmac_kids())
    await engine.complete(claimed.handle)
    await fails(deliver(engine, at))
    events = await sql.fetch("select to_jsonb(e)::text as text from flowfabric.event e")
    assert len(events) > 5
    told += [row["text"] for row in events]
    stored = await everything(sql)
    assert at.waitpoint_id.hex in stored.replace("-", ""), "this would be found"
    assert len(told) > 50
    for secret in secrets:
        for place, texts in {"told": told, "stored": [stored], "logged": [caplog.text], "heard": heard}.items():
            assert not [text for text in texts if secret in text.lower()], place
    # The token is no part of what can be written as JSON.
    with pytest.raises(TypeError):
        msgspec.json.encode(made)


async def test_the_kids_come_without_their_secrets(engine: ff.Engine, sql: asyncpg.Connection[Any]) -> None:
    await rotate(engine, "a", A)
    rows = await sql.fetch("select * from flowfabric.list_kids()")
    assert [set(row.keys()) for row in rows] == [{"kid", "state", "expires_at"}] * 2
    assert {field.name for field in msgspec.structs.fields(WaitpointKids)} == {"current_kid", "verifying"}
    assert {field.name for field in msgspec.structs.fields(VerifyingKid)} == {"kid", "expires_at"}


async def test_a_list_of_waitpoints_shows_kid_and_fingerprint_and_no_more(engine: ff.Engine) -> None:
    await rotate(engine, "a", A)
    at = await spot(engine)
    (listed,) = (await engine.list_pending_waitpoints(at.id)).items
    assert (listed.token_kid, listed.token_fingerprint) == ("a", hashlib.sha256(at.digest.encode()).hexdigest()[:16])
    assert [field.name for field in msgspec.structs.fields(type(listed))] == [
        "waitpoint_id", "waitpoint_key", "state", "required_signal_names", "created_at", "activated_at", "expires_at",
        "execution_id", "token_kid", "token_fingerprint",
    ]  # fmt: skip


async def test_a_role_with_execute_alone_can_mint_and_verify_but_has_no_hand_on_the_keys(
    database: str, sql: asyncpg.Connection[Any]
) -> None:
    async with a_role(sql) as role:
        await migrate_database(database, operate_roles=(role,))
        session = await asyncpg.connect(as_user(database, role))
        try:
            for statement in (
                "select kid from flowfabric.keystore",
                "select inner_key from flowfabric.keystore",
                "update flowfabric.keystore set state = 'current'",
                "delete from flowfabric.keystore",
                "insert into flowfabric.keystore (kid) values ('x')",
                f"select * from flowfabric.seed_secret('x', '\\x{A}')",
                f"select * from flowfabric.rotate_secret('x', '\\x{A}', 0)",
                "select flowfabric.seed_keystore()",
                "select flowfabric.purge_keys(now())",
                f"select flowfabric.token_digest('k1', 1, '{new_id()}', '{new_id()}')",
                f"select flowfabric.sign_token('k1', 1, '{new_id()}', '{new_id()}')",
                f"select flowfabric.check_token(1, '{new_id()}', '{new_id()}', 'x')",
                "select flowfabric.hmac('a', 'b', 'c')",
            ):
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await session.fetch(statement)
        finally:
            await session.close()
        async with await ff.Engine.connect(as_user(database, role)) as worker:
            for call in (
                worker.seed_waitpoint_hmac_secret("x", A),
                worker.rotate_waitpoint_hmac_secret_all("x", A, HOUR),
            ):
                with pytest.raises(ff.FlowFabricError) as error:
                    await call
                assert A not in str(error.value)
            assert await worker.list_waitpoint_hmac_kids() == WaitpointKids("k1", ())
            at = await spot(worker)
            assert await refused(worker, at, "rubbish") == "invalid_token"
            assert await stamp(worker, at.id) is not None
            await accepted(worker, at)
            assert await worker.audit(events=True) == []
    assert await states(sql) == {"k1": "current"}
