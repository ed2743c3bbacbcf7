"""Grants: signed, exclusive, short-lived, used once; and the leases that are taken over with them."""

from __future__ import annotations

import hashlib
import hmac
import json
from datetime import timedelta
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.errors import ValidationFailed
from flowfabric.values.attempt import Claimed
from flowfabric.values.grant import (
    ClaimGrant,
    GrantNotFound,
    NotReclaimable,
    ReclaimCapExceeded,
    ReclaimGrant,
    ResumeGrant,
)
from flowfabric.values.lease import Operator
from flowfabric.values.policies import ExecutionPolicy, RoutingRequirements, TimeoutPolicy
from tests.ids import home, id_in
from tests.sql.cases import World, outcome, shorthand
from tests.support import OTHER, WORKER, claim_one, new_id, submit

pytestmark = pytest.mark.asyncio(loop_scope="session")

STRANGER = {"worker_id": "another-pool", "worker_instance_id": "another-1"}
CAPABLE = ExecutionPolicy(routing_requirements=RoutingRequirements(required_capabilities=("gpu", "cuda")))
TTL = timedelta(seconds=5)


def minted() -> dict[str, Any]:
    return {"lease_id": new_id(), "attempt_id": new_id()}


async def granted(world: World, state: str = "W.1", **fields: Any) -> ClaimGrant:
    at = await world.reach(state, **fields)
    return await world.engine.issue_claim_grant(at.id, **WORKER, grant_ttl=TTL)


async def reclaim_granted(world: World, state: str = "X", **fields: Any) -> ReclaimGrant:
    at = await world.reach(state, **fields)
    grant = await world.engine.issue_reclaim_grant(at.id, **WORKER, grant_ttl=TTL)
    assert isinstance(grant, ReclaimGrant)
    return grant


async def stored(world: World, execution_id: ff.ExecutionId) -> dict[str, Any] | None:
    rows = (await world.picture(execution_id)).stored["claim_grant"]
    return rows[0] if rows else None


# The signature.

SECRET = bytes(32)
MESSAGE = "{fp:7}|11111111-2222-3333-4444-555555555555|pool-a|inst-1|1700000005000"


@pytest.mark.parametrize(
    ("kind", "digest"),
    [
        ("claim", "a1771cc2b7349e876b6a1e618c7a80dea18a011ff7126d6bbdfeb08ac641d39d"),
        ("reclaim", "a7104971dfb9f7b2884b6727d2a7daa730734433580030fe65653bd02a6680d1"),
    ],
)
async def test_the_signature_has_the_published_check_values(world: World, kind: str, digest: str) -> None:
    message = await world.sql.fetchval(
        "select flowfabric.grant_message(7, '11111111-2222-3333-4444-555555555555', 'pool-a', 'inst-1',"
        " 1700000005000, $1)",
        kind,
    )
    assert message == MESSAGE + ("|reclaim" if kind == "reclaim" else "")
    signed = await world.sql.fetchval(
        "select encode(flowfabric.hmac(flowfabric.hmac_block($1, 54), flowfabric.hmac_block($1, 92),"
        " convert_to('k1:' || $2, 'UTF8')), 'hex')",
        SECRET,
        message,
    )
    assert signed == digest


async def test_the_grant_id_of_the_published_key_is_its_hash() -> None:
    key = (
        "pg:{fp:7}:11111111-2222-3333-4444-555555555555:1700000005000:k1:"
        "a1771cc2b7349e876b6a1e618c7a80dea18a011ff7126d6bbdfeb08ac641d39d"
    )
    assert (
        hashlib.sha256(key.encode()).hexdigest() == "b760c2877cfb96a68ee90924837de7ba4cc239c7f445225eb396ca73af77e1bf"
    )


@pytest.mark.parametrize("length", [0, 1, 20, 32, 63, 64, 65, 200])
@pytest.mark.parametrize("message", [b"", b"k1:x", bytes(range(256))], ids=len)
async def test_the_database_signs_as_every_hmac_sha256_does(world: World, length: int, message: bytes) -> None:
    secret = bytes(range(length))
    signed = await world.sql.fetchval(
        "select flowfabric.hmac(flowfabric.hmac_block($1, 54), flowfabric.hmac_block($1, 92), $2)", secret, message
    )
    assert signed == hmac.new(secret, message, hashlib.sha256).digest()


async def test_bytes_are_the_same_only_when_they_are(world: World) -> None:
    for a, b in ((b"", b""), (b"ab", b"ab"), (b"ab", b"ac"), (b"a", b""), (b"ab", b"a"), (b"a", b"aa")):
        assert await world.sql.fetchval("select flowfabric.same_bytes($1, $2)", a, b) == (a == b)


@pytest.mark.parametrize("kind", ["claim", "reclaim"])
async def test_a_grant_key_is_signed_over_what_it_grants(world: World, kind: str) -> None:
    await world.sql.execute(
        "update flowfabric.keystore set inner_key = flowfabric.hmac_block($1, 54),"
        " outer_key = flowfabric.hmac_block($1, 92)",
        SECRET,
    )
    grant = await (granted(world) if kind == "claim" else reclaim_granted(world))
    expires = int(grant.expires_at.timestamp() * 1000)
    uuid = grant.execution_id
    tail = "|reclaim" if kind == "reclaim" else ""
    message = f"k1:{{fp:{home(uuid)}}}|{uuid}|pool|pool-1|{expires}{tail}"
    digest = hmac.new(SECRET, message.encode(), hashlib.sha256).hexdigest()
    prefix = "pg:reclaim:" if kind == "reclaim" else "pg:"
    assert grant.grant_key == f"{prefix}{{fp:{home(uuid)}}}:{uuid}:{expires}:k1:{digest}"
    assert grant.grant_key not in repr(grant)


def _tampered(key: str, place: int, text: str) -> str:
    parts = key.split(":")
    parts[place] = text
    return ":".join(parts)


@pytest.mark.parametrize("kind", ["claim", "reclaim"])
async def test_verify_returns_ok_or_exactly_one_reason(world: World, kind: str) -> None:
    grant = await (granted(world) if kind == "claim" else reclaim_granted(world))
    key, execution_id = grant.grant_key, grant.execution_id
    later = str(int(grant.expires_at.timestamp() * 1000) + 1)
    other_kind = key.replace("pg:reclaim:", "pg:") if kind == "reclaim" else key.replace("pg:", "pg:reclaim:")
    answers = {
        key: "ok",
        "": "malformed",
        "nonsense": "malformed",
        key[:-1]: "malformed",
        key + "0": "malformed",
        key.upper(): "malformed",
        key.replace("pg:", "xx:", 1): "malformed",
        _tampered(key, -3, "-1"): "malformed",
        _tampered(key, -3, "9" * 16): "malformed",
        _tampered(key, -3, "9" * 15): "signature_mismatch",
        _tampered(key, -3, "1000"): "expired",
        _tampered(key, -2, "k9"): "unknown_kid",
        _tampered(key, -1, "0" * 64): "signature_mismatch",
        _tampered(key, -3, later): "signature_mismatch",
        other_kind: "signature_mismatch",
    }
    for presented, answer in answers.items():
        assert await world.engine.verify_grant(execution_id, presented) == answer, presented
    assert await world.engine.verify_grant(id_in(9), key) == "malformed"

    await world.clock.advance(seconds=6)
    assert await world.engine.verify_grant(execution_id, key) == "expired"


async def test_verify_does_not_know_a_grant_that_was_used_or_withdrawn(world: World) -> None:
    grant = await granted(world)
    claimed = await world.engine.claim_execution(grant.execution_id, **WORKER, **minted())
    assert await world.engine.verify_grant(grant.execution_id, grant.grant_key) == "unknown_grant"
    # Nor when the same worker holds a newer grant for the same execution.
    await world.engine.release(claimed.handle)
    newer = await world.engine.issue_claim_grant(grant.execution_id, **WORKER, grant_ttl=TTL)
    assert await world.engine.verify_grant(grant.execution_id, grant.grant_key) == "unknown_grant"
    assert await world.engine.verify_grant(grant.execution_id, newer.grant_key) == "ok"


async def test_a_key_that_was_rotated_out_verifies_within_its_grace_only(world: World) -> None:
    grant = await granted(world)
    await world.sql.execute(
        "update flowfabric.keystore set state = 'verifying', expires_at = flowfabric.now() + interval '2 s'"
    )
    await world.sql.execute(
        "insert into flowfabric.keystore (kid, inner_key, outer_key, state, installed_at)"
        " values ('k2', flowfabric.hmac_block('\\x01', 54), flowfabric.hmac_block('\\x01', 92), 'current', now())"
    )
    assert await world.engine.verify_grant(grant.execution_id, grant.grant_key) == "ok"
    assert ":k2:" in (await granted(world)).grant_key
    await world.clock.advance(seconds=3)
    assert await world.engine.verify_grant(grant.execution_id, grant.grant_key) == "unknown_kid"


async def test_without_a_signing_key_no_grant_is_issued_and_direct_claims_go_on(world: World) -> None:
    at = await world.reach("W.1")
    await world.sql.execute("update flowfabric.keystore set state = 'verifying', expires_at = 'infinity'")
    assert await outcome(world.engine.issue_claim_grant(at.id, **WORKER)) == "unavailable"
    # Asked before anything else, the execution included.
    assert await outcome(world.engine.issue_reclaim_grant(id_in(3), **WORKER)) == "unavailable"
    assert await stored(world, at.id) is None
    assert (await claim_one(world.engine)).execution_id == at.id


# One live grant, for one worker, for a short time.


@pytest.mark.parametrize("state", ["W.1", "W.r", "W.p", "W.i"])
async def test_a_grant_changes_no_state_but_hides_the_execution_from_others(world: World, state: str) -> None:
    at = await world.reach(state)
    before = await world.picture(at.id)
    grant = await world.engine.issue_claim_grant(
        at.id, **WORKER, grant_ttl=TTL, worker_capabilities=["b", "a"], capability_hash="h", admission_summary="s"
    )
    after = await world.picture(at.id)
    assert after.record == before.record
    assert after.since(before) == []
    row = await stored(world, at.id)
    assert row is not None
    assert (row["kind"], row["worker_id"], row["worker_instance_id"], row["ttl_ms"]) == (
        "claim",
        "pool",
        "pool-1",
        5000,
    )
    assert (row["worker_capabilities"], row["capability_hash"], row["admission_summary"]) == (["a", "b"], "h", "s")
    assert row["grant_key"] == grant.grant_key

    # Not even its own worker gets it through a direct claim.
    assert await world.engine.claim(**WORKER) is None
    assert await world.engine.claim(**OTHER) is None
    assert await outcome(world.engine.issue_claim_grant(at.id, **STRANGER)) == "grant_already_exists"
    assert await outcome(world.engine.issue_claim_grant(at.id, **WORKER)) == "grant_already_exists"
    assert await outcome(world.engine.issue_grant_and_claim(at.id)) == "grant_already_exists"
    assert await outcome(world.engine.block_execution_for_admission(at.id, "waiting_for_quota")) == (
        "execution_not_eligible"
    )
    assert await stored(world, at.id) == row


@pytest.mark.parametrize("state", ["W.1", "W.i", "X", "V"])
async def test_a_grant_that_lapsed_is_as_if_it_had_never_been(world: World, state: str) -> None:
    first = await (granted(world, state) if state[0] == "W" else reclaim_granted(world, state))
    await world.clock.advance(seconds=4)
    assert await world.engine.claim(**OTHER) is None
    await world.clock.advance(seconds=2)
    # Nothing swept it away.
    assert await stored(world, first.execution_id) is not None
    if state[0] == "W":
        again = await world.engine.issue_claim_grant(first.execution_id, **STRANGER, grant_ttl=TTL)
    else:
        again = await world.engine.issue_reclaim_grant(first.execution_id, **STRANGER, grant_ttl=TTL)  # type: ignore[assignment]
    assert again.grant_key != first.grant_key
    await world.clock.advance(seconds=6)
    assert (await claim_one(world.engine, **OTHER)).execution_id == first.execution_id


async def test_the_operator_ignores_an_expired_grant(world: World) -> None:
    grant = await granted(world)
    await world.clock.advance(seconds=6)
    assert isinstance(await world.engine.issue_grant_and_claim(grant.execution_id), Claimed)
    assert await stored(world, grant.execution_id) is None


async def test_the_sweep_removes_lapsed_grants_and_no_live_one(world: World) -> None:
    lapsed = await granted(world)
    await world.clock.advance(seconds=6)
    live = await granted(world)
    await world.engine.sweep()
    assert await stored(world, lapsed.execution_id) is None
    assert await stored(world, live.execution_id) is not None


LEAVES = {
    "cancel": lambda w, i: w.engine.cancel(Operator(i), "x"),
    "deadline": lambda w, i: w.engine.expire_execution(i, "execution_deadline"),
}


@pytest.mark.parametrize("way", LEAVES)
async def test_an_execution_that_ends_takes_its_grant_with_it(world: World, way: str) -> None:
    grant = await granted(world, execution_deadline_at=timedelta(seconds=2))
    await world.clock.advance(seconds=3)
    await LEAVES[way](world, grant.execution_id)
    assert (await world.at(grant.execution_id))[0] == "T"
    assert await stored(world, grant.execution_id) is None


async def test_a_reclaim_grant_goes_when_the_attempt_times_out(world: World) -> None:
    policy = ExecutionPolicy(
        retry_policy=ff.RetryPolicy(), timeout_policy=TimeoutPolicy(attempt_timeout=timedelta(seconds=34))
    )
    grant = await reclaim_granted(world, policy=policy)
    await world.clock.advance(seconds=4)
    assert await world.engine.expire_execution(grant.execution_id, "attempt_timeout") == "retry_scheduled"
    assert await stored(world, grant.execution_id) is None
    assert await world.at(grant.execution_id) == "D.r"


async def test_changing_the_priority_leaves_a_grant_alone(world: World) -> None:
    grant = await granted(world)
    await world.engine.change_priority(grant.execution_id, 77)
    assert await world.engine.claim(**OTHER) is None
    claimed = await world.engine.claim_execution(grant.execution_id, **WORKER, **minted(), grant_key=grant.grant_key)
    assert claimed.priority == 77


async def test_a_worker_that_lacks_a_capability_gets_no_grant_and_leaves_a_stamp(world: World) -> None:
    execution_id = await submit(world.engine, policy=CAPABLE)
    with pytest.raises(ValidationFailed) as caught:
        await world.engine.issue_claim_grant(execution_id, **WORKER, worker_capabilities=["other"])
    assert (caught.value.kind, caught.value.detail) == ("capability_mismatch", "cuda,gpu")
    record = await world.record(execution_id)
    assert record.last_capability_mismatch_at is not None
    assert await stored(world, execution_id) is None
    await world.engine.issue_claim_grant(execution_id, **WORKER, worker_capabilities=["gpu", "cuda", "other"])


async def test_a_live_grant_and_a_wrong_state_are_reported_before_missing_capabilities(world: World) -> None:
    execution_id = await submit(world.engine, policy=CAPABLE)
    await world.engine.issue_claim_grant(execution_id, **WORKER, worker_capabilities=["gpu", "cuda"])
    assert await outcome(world.engine.issue_claim_grant(execution_id, **OTHER)) == "grant_already_exists"
    assert (await world.record(execution_id)).last_capability_mismatch_at is None
    delayed = await submit(world.engine, policy=CAPABLE, delay_until=timedelta(hours=1))
    assert await outcome(world.engine.issue_claim_grant(delayed, **OTHER)) == "execution_not_eligible"
    assert (await world.record(delayed)).last_capability_mismatch_at is None


@pytest.mark.parametrize(
    "tokens", [["a,b"], [""], ["a b"], ["x\n"], ["t"] + [f"t{n}" for n in range(256)], ["y" * 4097]]
)
async def test_a_malformed_capability_is_always_refused(world: World, tokens: list[str]) -> None:
    at = await world.reach("W.1")
    for call in (
        world.engine.issue_claim_grant(at.id, **WORKER, worker_capabilities=tokens),
        world.engine.issue_reclaim_grant(at.id, **WORKER, worker_capabilities=tokens),
        world.engine.claim(**WORKER, capabilities=tokens),
    ):
        assert await outcome(call) == "invalid_capabilities"


# From grant to lease.


@pytest.mark.parametrize("state", ["W.1", "W.r", "W.p", "W.i"])
async def test_a_grant_yields_one_lease_under_the_ids_of_its_worker(world: World, state: str) -> None:
    grant = await granted(world, state)
    before = await world.record(grant.execution_id)
    ids = minted()
    if state == "W.i":
        del ids["attempt_id"]
        claimed = await world.engine.claim_resumed_execution(
            grant.execution_id, **OTHER, **ids, grant_key=grant.grant_key, current_attempt_index=9
        )
        assert before.current_attempt is not None
        assert claimed.handle.attempt_id == before.current_attempt.attempt_id
    else:
        claimed = await world.engine.claim_execution(
            grant.execution_id, **OTHER, **ids, grant_key=grant.grant_key, expected_attempt_index=9
        )
        assert claimed.handle.attempt_id == ids["attempt_id"]
        assert claimed.handle.attempt_index == before.total_attempt_count
    assert claimed.handle.lease_id == ids["lease_id"]
    assert claimed.handle.lease_epoch == before.current_lease_epoch + 1
    lease = (await world.record(grant.execution_id)).current_lease
    assert lease is not None
    # Another instance of the same pool may use the grant, and then owns the lease.
    assert (lease.worker_id, lease.worker_instance_id) == ("pool", "pool-2")
    assert lease.renewal_deadline - lease.acquired_at == timedelta(seconds=20)
    assert lease.expires_at - lease.acquired_at == timedelta(seconds=30)
    assert await stored(world, grant.execution_id) is None
    await world.engine.complete(claimed.handle)


@pytest.mark.parametrize("state", ["W.1", "W.i"])
async def test_a_second_use_of_a_grant_fails(world: World, state: str) -> None:
    grant = await granted(world, state)
    claim = _claim_with(world, grant)
    assert isinstance(await claim(), Claimed)
    before = await world.picture(grant.execution_id)
    assert await outcome(claim()) == "execution_not_leaseable"
    assert await world.picture(grant.execution_id) == before
    # Nor once the work was given back.
    record = await world.record(grant.execution_id)
    assert record.current_lease is not None
    await world.engine.release(Operator(grant.execution_id))
    resume = world.engine.claim_resumed_execution(grant.execution_id, **WORKER, lease_id=new_id())
    assert await outcome(resume) == "invalid_claim_grant"


def _claim_with(world: World, grant: ClaimGrant, **fields: Any) -> Any:
    async def claim(**more: Any) -> Claimed:
        given = {**WORKER, "lease_id": new_id(), "grant_key": grant.grant_key, **fields, **more}
        record = await world.record(grant.execution_id)
        if record.pending == "interrupted":
            return await world.engine.claim_resumed_execution(grant.execution_id, **given)
        return await world.engine.claim_execution(grant.execution_id, **{"attempt_id": new_id(), **given})

    return claim


@pytest.mark.parametrize("state", ["W.1", "W.i"])
async def test_a_repeated_claim_whose_response_was_lost_gets_the_same_lease(world: World, state: str) -> None:
    grant = await granted(world, state)
    ids = minted()
    if state == "W.i":
        del ids["attempt_id"]
    call = world.engine.claim_resumed_execution if state == "W.i" else world.engine.claim_execution
    first = await call(grant.execution_id, **WORKER, **ids)
    before = await world.picture(grant.execution_id)
    assert await call(grant.execution_id, **WORKER, **ids) == first
    assert await world.picture(grant.execution_id) == before
    other = {**ids, "lease_id": new_id()}
    assert await outcome(call(grant.execution_id, **WORKER, **other)) == "execution_not_leaseable"
    if state == "W.1":
        other = {**ids, "attempt_id": new_id()}
        assert await outcome(call(grant.execution_id, **WORKER, **other)) == "execution_not_leaseable"
    await world.clock.advance(seconds=31)
    assert await outcome(call(grant.execution_id, **WORKER, **ids)) == "execution_not_leaseable"


@pytest.mark.parametrize("state", ["W.1", "W.i"])
async def test_a_grant_of_another_worker_or_key_is_no_grant_and_stays(world: World, state: str) -> None:
    grant = await granted(world, state)
    claim = _claim_with(world, grant)
    row = await stored(world, grant.execution_id)
    assert await outcome(claim(**STRANGER)) == "invalid_claim_grant"
    assert await outcome(claim(grant_key=grant.grant_key[:-1] + "x")) == "invalid_claim_grant"
    assert await outcome(claim(grant_key="")) == "invalid_claim_grant"
    # Another worker's claim on a lapsed grant is told about the worker first.
    await world.clock.advance(seconds=6)
    assert await outcome(claim(**STRANGER)) == "invalid_claim_grant"
    assert await stored(world, grant.execution_id) == row


@pytest.mark.parametrize("state", ["W.1", "W.i"])
async def test_a_lapsed_grant_is_reported_once_and_then_gone(world: World, state: str) -> None:
    grant = await granted(world, state)
    claim = _claim_with(world, grant)
    await world.clock.advance(seconds=6)
    assert await outcome(claim()) == "claim_grant_expired"
    assert await stored(world, grant.execution_id) is None
    assert await outcome(claim()) == "invalid_claim_grant"


async def test_the_wrong_way_of_claiming_keeps_the_grant_for_the_right_one(world: World) -> None:
    grant = await granted(world, "W.i")
    fresh = world.engine.claim_execution(grant.execution_id, **WORKER, **minted())
    assert await outcome(fresh) == "use_claim_resumed_execution"
    resumed = await world.engine.claim_from_resume_grant(grant, **WORKER)
    assert resumed is not None
    assert resumed.handle.kind == "resumed"


@pytest.mark.parametrize("state", ["D.1", "B.quota", "A", "X", "V", "T:completed", "T:cancelled"])
async def test_a_stale_resume_grant_returns_nothing(world: World, state: str) -> None:
    at = await world.reach(state)
    grant = ResumeGrant(
        execution_id=at.id,
        grant_key="any",
        expires_at=await world.clock.now(),
        lane_id="default",
    )
    before = await world.picture(at.id)
    assert await world.engine.claim_from_resume_grant(grant, **WORKER) is None
    assert await world.picture(at.id) == before


async def test_the_operator_claims_despite_requirements_and_under_its_own_name(world: World) -> None:
    execution_id = await submit(world.engine, policy=CAPABLE)
    claimed = await world.engine.issue_grant_and_claim(execution_id, lease_duration=timedelta(seconds=9))
    lease = (await world.record(execution_id)).current_lease
    assert lease is not None
    assert (lease.worker_id, lease.worker_instance_id) == ("operator", "operator")
    assert lease.expires_at - lease.acquired_at == timedelta(seconds=9)
    await world.engine.complete(claimed.handle)


async def test_a_lineage_tells_why_an_attempt_exists(world: World) -> None:
    engine = world.engine
    retry = ExecutionPolicy(retry_policy=ff.RetryPolicy(backoff=ff.Fixed(timedelta(0))))
    execution_id = await submit(engine, policy=retry)
    await engine.fail((await claim_one(engine)).handle, "boom", category="network")
    await engine.promote_delayed(execution_id)
    await engine.complete((await claim_one(engine)).handle)
    await engine.replay_execution(execution_id, reason="again", requested_by="me")
    await claim_one(engine)
    await engine.revoke_lease(execution_id)
    await claim_one(engine)
    first, second, third, fourth = await engine.list_attempts(execution_id)
    assert (first.attempt_type, first.previous_attempt_index, first.end_disposition) == (
        "initial",
        None,
        "retry_scheduled",
    )
    assert (first.failure_reason, first.failure_category) == ("boom", "network")
    assert (second.attempt_type, second.retry_reason, second.previous_attempt_index) == ("retry", "boom", 0)
    assert (third.attempt_type, third.replay_reason, third.replay_requested_by) == ("replay", "again", "me")
    assert (third.previous_attempt_index, third.replayed_from_attempt_index) == (1, 1)
    assert (third.reclaim_reason, third.attempt_lifecycle) == ("lease_revoked", "interrupted_reclaimed")
    assert (fourth.attempt_type, fourth.previous_attempt_index, fourth.replay_reason) == ("reclaim", 2, None)


# Taking over a lost lease.


@pytest.mark.parametrize("state", ["X", "V"])
async def test_a_reclaim_grant_changes_no_state_and_reserves_the_lost_lease(world: World, state: str) -> None:
    at = await world.reach(state)
    before = await world.picture(at.id)
    grant = await world.engine.issue_reclaim_grant(at.id, **WORKER, grant_ttl=TTL)
    assert isinstance(grant, ReclaimGrant)
    assert grant.lane_id == "default"
    after = await world.picture(at.id)
    assert after.record == before.record
    assert after.since(before) == []
    assert await world.engine.claim(**OTHER) is None
    assert await outcome(world.engine.issue_reclaim_grant(at.id, **STRANGER)) == "grant_already_exists"
    assert await outcome(world.engine.issue_claim_grant(at.id, **WORKER)) == "execution_not_eligible"


async def test_a_lapsed_lease_is_marked_by_the_call_that_asks_for_it(world: World) -> None:
    at = await world.reach("A")
    assert isinstance(await world.engine.issue_reclaim_grant(at.id, **WORKER), NotReclaimable)
    await world.clock.advance(seconds=31)
    before = await world.picture(at.id)
    assert isinstance(await world.engine.issue_reclaim_grant(at.id, **WORKER), ReclaimGrant)
    after = await world.picture(at.id)
    assert (after.at, shorthand(after.since(before))) == ("X", ["L:expired"])


@pytest.mark.parametrize("state", ["X", "V"])
async def test_a_reclaim_replaces_the_attempt_under_the_ids_of_the_new_worker(world: World, state: str) -> None:
    grant = await reclaim_granted(world, state)
    before = await world.picture(grant.execution_id)
    assert before.record is not None
    ids = minted()
    claimed = await world.engine.reclaim_execution(
        grant.execution_id, **OTHER, **ids, grant_key=grant.grant_key, attempt_policy={"priority": 1}
    )
    assert isinstance(claimed, Claimed)
    assert claimed.handle.kind == "reclaimed"
    assert (claimed.handle.lease_id, claimed.handle.attempt_id) == (ids["lease_id"], ids["attempt_id"])
    assert (claimed.handle.lease_epoch, claimed.handle.attempt_index) == (2, 1)
    after = await world.picture(grant.execution_id)
    assert after.record is not None
    assert after.record.started_at == before.record.started_at
    assert (after.record.lease_lost_at, after.record.lease_revoke_reason) == (None, None)
    assert after.attempts[-1].policy_snapshot == {"priority": 1}
    (event,) = after.since(before)
    assert (event["lease_type"], event["lease_epoch"], event["details"]) == (
        "reclaimed",
        1,
        {"new_lease_epoch": 2},
    )
    assert (event["worker_id"], event["worker_instance_id"]) == ("pool", "pool-2")
    # The grant is used up.
    again = await world.engine.reclaim_execution(grant.execution_id, **WORKER, **minted())
    assert isinstance(again, GrantNotFound)
    await world.engine.complete(claimed.handle)


async def test_a_reclaim_grant_of_another_worker_is_invalid_and_stays(world: World) -> None:
    grant = await reclaim_granted(world, policy=None)
    row = await stored(world, grant.execution_id)
    # Told before the cap, which would end the execution.
    call = world.engine.reclaim_execution(grant.execution_id, **STRANGER, **minted(), max_reclaim_count=0)
    assert await outcome(call) == "invalid_input"
    assert await stored(world, grant.execution_id) == row
    assert await world.at(grant.execution_id) == "X"


async def test_a_reclaim_needs_a_live_grant_of_its_own_kind(world: World) -> None:
    claim_grant = await granted(world)
    answer = await world.engine.reclaim_execution(claim_grant.execution_id, **WORKER, **minted())
    assert isinstance(answer, GrantNotFound)
    assert await stored(world, claim_grant.execution_id) is not None
    lapsed = await reclaim_granted(world)
    await world.clock.advance(seconds=6)
    answer = await world.engine.reclaim_execution(lapsed.execution_id, **WORKER, **minted())
    assert isinstance(answer, GrantNotFound)
    assert await world.at(lapsed.execution_id) == "X"


async def test_a_live_lease_is_never_stolen_and_the_grant_that_tried_is_deleted(world: World) -> None:
    grant = await reclaim_granted(world)
    kept = await stored(world, grant.execution_id)
    assert kept is not None
    claimed = await world.engine.reclaim_execution(grant.execution_id, **WORKER, **minted())
    assert isinstance(claimed, Claimed)
    # No sequence of calls leaves a reclaim grant beside a live lease; the check must hold all the same.
    world.engine.checking = False
    await world.sql.execute(
        "insert into flowfabric.claim_grant"
        " select * from jsonb_populate_record(null::flowfabric.claim_grant, $1::jsonb)",
        json.dumps(kept),
    )
    before = await world.picture(grant.execution_id)
    answer = await world.engine.reclaim_execution(grant.execution_id, **WORKER, **minted())
    assert isinstance(answer, NotReclaimable)
    after = await world.picture(grant.execution_id)
    assert after.record == before.record
    assert after.stored["claim_grant"] == []
    world.engine.checking = True
    await world.engine.complete(claimed.handle)


async def test_a_missing_capability_is_reported_before_the_cap_is_checked(world: World) -> None:
    policy = ExecutionPolicy(
        max_reclaim_count=0, routing_requirements=RoutingRequirements(required_capabilities=("gpu",))
    )
    execution_id = await submit(world.engine, policy=policy)
    await claim_one(world.engine, capabilities=["gpu"])
    await world.engine.revoke_lease(execution_id)
    answer = await world.engine.issue_reclaim_grant(execution_id, **WORKER)
    assert isinstance(answer, NotReclaimable)
    assert answer.detail == "capability_mismatch:gpu"
    assert (await world.record(execution_id)).last_capability_mismatch_at is not None
    assert await world.at(execution_id) == "V"
    answer = await world.engine.issue_reclaim_grant(execution_id, **WORKER, worker_capabilities=["gpu"])
    assert answer == ReclaimCapExceeded(execution_id, 0)


async def test_a_live_grant_is_reported_before_the_cap_is_checked(world: World) -> None:
    grant = await reclaim_granted(world, policy=None)
    call = world.engine.issue_reclaim_grant(grant.execution_id, **WORKER, max_reclaim_count=0)
    assert await outcome(call) == "grant_already_exists"
    assert await world.at(grant.execution_id) == "X"


# The policy, the argument of the caller, the cap they give, and the call that meets it.
CAPS = [
    ({"max_reclaim_count": 2}, None, 2, "grant"),
    ({"max_reclaim_count": 2}, 0, 2, "grant"),
    ({"max_reclaim_count": 2}, None, 2, "claim"),
    ({"max_reclaim_count": 1, "timeout_policy": {"max_reclaim_count": 50}}, None, 1, "grant"),
    ({"max_reclaim_count": 0}, None, 0, "claim"),
    (None, 3, 3, "grant"),
    (None, 3, 3, "reclaim"),
    (None, 0, 0, "grant"),
    (None, 0, 0, "reclaim"),
]


@pytest.mark.parametrize(("policy", "argument", "cap", "last"), CAPS, ids=str)
async def test_exactly_as_many_reclaims_as_the_cap_allows_succeed(
    world: World, policy: Any, argument: int | None, cap: int, last: str
) -> None:
    execution_id = await submit(world.engine, policy=policy)
    await claim_one(world.engine)
    for done in range(cap):
        await world.engine.revoke_lease(execution_id)
        grant = await world.engine.issue_reclaim_grant(execution_id, **WORKER, max_reclaim_count=argument)
        assert isinstance(grant, ReclaimGrant), done
        claimed = await world.engine.reclaim_execution(execution_id, **WORKER, **minted(), max_reclaim_count=argument)
        assert isinstance(claimed, Claimed)
    await world.engine.revoke_lease(execution_id)
    before = await world.picture(execution_id)
    match last:
        case "grant":
            answer = await world.engine.issue_reclaim_grant(execution_id, **WORKER, max_reclaim_count=argument)
            assert answer == ReclaimCapExceeded(execution_id, cap)
        case "reclaim":
            await world.engine.issue_reclaim_grant(execution_id, **WORKER)
            answer = await world.engine.reclaim_execution(
                execution_id, **WORKER, **minted(), max_reclaim_count=argument
            )
            assert answer == ReclaimCapExceeded(execution_id, cap)
        case _:
            assert await world.engine.claim(**WORKER) is None
    after = await world.picture(execution_id)
    assert after.record is not None
    assert after.at == "T:failed"
    assert after.record.failure_reason == "max_reclaims_exceeded"
    assert (after.record.lease_reclaim_count, after.record.total_attempt_count) == (cap, cap + 1)
    (event,) = after.since(before)
    assert shorthand([event]) == ["L:revoked", "K:failed"]
    assert (event["reason"], event["revoked_by"]) == ("max_reclaims_exceeded", "reconciler")
    assert after.stored["claim_grant"] == []


@pytest.mark.parametrize(("policy", "argument", "cap"), [({}, 5, 100), (None, None, 1000), (None, 7, 7)])
async def test_the_cap_is_the_policys_then_the_callers_then_a_thousand(
    world: World, policy: Any, argument: int | None, cap: int
) -> None:
    text = None if policy is None else "{}"
    assert await world.sql.fetchval("select flowfabric.reclaim_cap($1::json, $2)", text, argument) == cap


async def test_the_search_continues_after_executions_at_their_cap(world: World) -> None:
    capped = []
    for _ in range(2):
        capped.append(await submit(world.engine, policy=ExecutionPolicy(max_reclaim_count=0), priority=9))
        await claim_one(world.engine)
    for execution_id in capped:
        await world.engine.revoke_lease(execution_id)
    good = await submit(world.engine)
    assert (await claim_one(world.engine)).execution_id == good
    assert [await world.at(execution_id) for execution_id in capped] == ["T:failed", "T:failed"]


async def test_automatic_reclaim_can_be_switched_off_and_put_off(world: World) -> None:
    await world.sql.execute("update flowfabric.deployment set reclaim_grace = '10 s'")
    at = await world.reach("X")
    assert await world.engine.claim(**OTHER) is None
    await world.clock.advance(seconds=11)
    await world.sql.execute("update flowfabric.deployment set auto_reclaim = false")
    assert await world.engine.claim(**OTHER) is None
    # Asking for it by name works in any case.
    assert isinstance(await world.engine.issue_reclaim_grant(at.id, **WORKER, grant_ttl=TTL), ReclaimGrant)
    await world.clock.advance(seconds=6)
    await world.sql.execute("update flowfabric.deployment set auto_reclaim = true")
    assert (await claim_one(world.engine, **OTHER)).handle.kind == "reclaimed"


async def test_the_grace_begins_with_the_end_of_the_lease_and_not_when_that_is_noticed(world: World) -> None:
    await world.sql.execute("update flowfabric.deployment set reclaim_grace = '10 s'")
    held = await world.reach("A")
    await world.clock.advance(seconds=3600)
    assert (await world.engine.run_timers("lease")).handled == 1
    assert (await claim_one(world.engine, **OTHER)).execution_id == held.id


async def test_work_for_a_missing_capability_blocks_no_other(world: World) -> None:
    hard = [await submit(world.engine, policy=CAPABLE, priority=5) for _ in range(3)]
    easy = await submit(world.engine)
    assert (await claim_one(world.engine)).execution_id == easy
    assert await world.engine.claim(**WORKER, capabilities=["gpu"]) is None
    found = await claim_one(world.engine, capabilities=["gpu", "cuda"])
    assert found.execution_id == hard[0]


@pytest.mark.both_servers
async def test_an_id_that_an_earlier_attempt_bears_is_refused(world: World) -> None:
    at = await world.reach("X")
    grant = await world.engine.issue_reclaim_grant(at.id, **WORKER, grant_ttl=TTL)
    assert isinstance(grant, ReclaimGrant)
    for used in ({"attempt_id": at.handle.attempt_id}, {"lease_id": at.handle.lease_id}):
        with pytest.raises(ff.InvalidInput, match="already has it"):
            await world.engine.reclaim_execution(at.id, **WORKER, **{**minted(), **used})
    assert isinstance(await world.engine.reclaim_execution(at.id, **WORKER, **minted()), Claimed)
