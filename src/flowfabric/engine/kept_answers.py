"""Answers of the server that are kept for repeats of a request with an idempotency key."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

from flowfabric._postgres import statements
from flowfabric._postgres.rows import decode_json
from flowfabric.engine.acting import Acting
from flowfabric.engine.checks import check_duration, check_int, optional_bytes, to_json
from flowfabric.errors import Conflict, InvalidInput
from flowfabric.values.checks import KEY_MAX_BYTES, check_text
from flowfabric.values.ids import parse_uuid
from flowfabric.values.kept_answer import AnswerKey, KeptAnswer, Repeat

KEPT_FOR = timedelta(hours=24)
HELD_FOR = timedelta(minutes=5)


class KeptAnswers(Acting):
    """begin_answer, finish_answer, forget_answer."""

    async def begin_answer(
        self, key: AnswerKey, request: bytes, *, held_for: timedelta = HELD_FOR, kept_for: timedelta = KEPT_FOR
    ) -> KeptAnswer:
        """Announce a request, or find out that it is a repeat. `request` is a digest of what is asked for.

        A request counts as under way for `held_for`. A repeat later than that takes its place.
        """
        row = await self._row(
            statements.BEGIN_ANSWER,
            *_words(key),
            optional_bytes(request, "request") or b"",
            parse_uuid(key.holder, "holder"),
            check_duration(held_for, "held_for"),
            check_duration(kept_for, "kept_for"),
            repeatable=True,
        )
        return KeptAnswer(
            repeat=Repeat(row["code"]),
            status=row["status"],
            headers=decode_json(row["headers"]) or {},
            body=row["body"] or b"",
        )

    async def finish_answer(
        self, key: AnswerKey, *, status: int | None, headers: dict[str, str] | None = None, body: bytes = b""
    ) -> None:
        """Keep the answer; call it on the engine of `acting`, so that it commits with what was done.

        `status` None: the answer has a secret; only that there was one is kept. If a repeat took this request's place
        meanwhile, it raises `Conflict` (request_in_progress), and the transaction of `acting` rolls back.
        """
        row = await self._row(
            statements.FINISH_ANSWER,
            *_words(key),
            parse_uuid(key.holder, "holder"),
            None if status is None else check_int(status, "status", 100, 599),
            None if status is None else to_json(headers or {}),
            None if status is None else optional_bytes(body, "body"),
        )
        if not row["finished"]:
            self.roll_back()
            raise Conflict("request_in_progress", "a repeat of this request took its place")

    async def forget_answer(self, key: AnswerKey) -> None:
        """Let the idempotency key be used again: the request did nothing."""
        await self._row(statements.FORGET_ANSWER, *_words(key), parse_uuid(key.holder, "holder"), repeatable=True)


def _words(key: object) -> tuple[str, str, str]:
    if not isinstance(key, AnswerKey) or not isinstance(key.holder, UUID):
        raise InvalidInput(f"got {type(key).__name__}", field="key", allowed="an AnswerKey")
    return (
        check_text(key.key_id, "key.key_id"),
        check_text(key.operation, "key.operation"),
        check_text(key.idempotency_key, "key.idempotency_key", KEY_MAX_BYTES),
    )
