"""Everything the app stores is encrypted, and bound to its execution: copied to another one, it cannot be read.

Keys can be changed at any time. `PAYLOAD_KEYS` lists them as `id:base64`, separated by commas. The first one writes,
the others still read: to change keys put a new one in front, and drop an old one when no data written with it is left.
The cipher comes from a package of its own: `pip install cryptography`.
"""

import asyncio
import base64
import os
from typing import Literal
from uuid import UUID

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

import flowfabric as ff

NONCE_BYTES = 12


class AesGcm:
    """A codec that encrypts and authenticates with one key. Its name, stored with the data, has the key's id."""

    binds: Literal[True] = True  # its methods get the id of the execution

    def __init__(self, key_id: str, key: bytes) -> None:
        self.name = f"aes-gcm-{key_id}"
        self._cipher = AESGCM(key)

    def encode(self, data: bytes, execution_id: UUID | None, /) -> bytes:
        nonce = os.urandom(NONCE_BYTES)  # never the same twice under one key
        return nonce + self._cipher.encrypt(nonce, data, self._owner(execution_id))

    def decode(self, data: bytes, execution_id: UUID | None, /) -> bytes:
        return self._cipher.decrypt(data[:NONCE_BYTES], data[NONCE_BYTES:], self._owner(execution_id))

    def _owner(self, execution_id: UUID | None) -> bytes:
        return f"{self.name} {execution_id}".encode()


def codecs_from_environment() -> list[AesGcm]:
    listed = os.environ.get("PAYLOAD_KEYS")
    if not listed:  # only for a demonstration: the key is lost when this process ends
        return [AesGcm("demo", AESGCM.generate_key(bit_length=256))]
    pairs = (entry.split(":", 1) for entry in listed.split(","))
    return [AesGcm(key_id, base64.b64decode(key)) for key_id, key in pairs]


newest, *older = codecs_from_environment()
app = ff.App(codecs=[newest], also_read=older, accept_plain=False)


@app.task
async def triage(patient: str, temperature: float) -> str:
    return f"{patient}: {'see a doctor' if temperature > 38 else 'rest'}"


async def main() -> None:
    async with app, ff.Worker(app):
        run = await triage.submit("Ada", 38.5)
        print("result:", await run.result())

        engine = (await app.client()).engine
        arguments = await engine.read_execution_context(run.execution_id)
        result = await engine.read_result(run.execution_id)
        assert result is not None
        for what, data, encoding in (
            ("arguments", arguments.input_payload, arguments.payload_encoding),
            ("result", result.payload, result.encoding),
        ):
            assert data is not None
            print(f"stored {what}: {len(data)} bytes of {encoding},", "readable" if b"Ada" in data else "unreadable")


if __name__ == "__main__":
    asyncio.run(main())
