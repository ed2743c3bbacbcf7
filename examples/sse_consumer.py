"""Follow what ends over HTTP, with nothing but the standard library; after a cut the id of the last event continues."""

import asyncio
import http.client
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import flowfabric as ff

app = ff.App()


@app.task
async def ship(order: int) -> str:
    return f"order {order} is shipped"


class Consumer:
    """Imports nothing of flowfabric: a program in any language reads events in this way."""

    def __init__(self, port: int, key: str) -> None:
        self.port, self.key = port, key
        self.last_id: str | None = None  # a real one stores it after it has acted on the event
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def connect(self) -> None:
        headers = {"Authorization": f"Bearer {self.key}", "Accept": "text/event-stream"}
        if self.last_id is not None:
            headers["Last-Event-ID"] = self.last_id
        self.connection.request("GET", "/v1/events?family=completion&kind=ship", headers=headers)
        self.response = self.connection.getresponse()
        assert self.response.status == 200, self.response.read()

    def cut(self) -> None:
        self.response.close()
        self.connection.close()

    def take(self, count: int) -> list[Any]:
        """Read events until there are `count` with data."""
        found: list[Any] = []
        for name, data in self.events():
            if name == "reset":
                print("events were removed before they were read")
            elif name == "message" and len(found := [*found, json.loads(data)]) == count:
                break
        return found

    def events(self) -> Iterator[tuple[str, str]]:
        name, data = "message", ""
        while line := self.response.readline().decode():
            field, _, value = line.rstrip("\n").partition(": ")
            if field == "id":
                self.last_id = value
            elif field == "event":
                name = value
            elif field == "data":
                data += value
            elif field == "" and data:  # an empty line ends an event; without data it only moved the id
                yield name, data
                name, data = "message", ""


def start_server() -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-m", "flowfabric.cli", "server", "--listen", "127.0.0.1:0", "--no-access-log"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    for line in server.stderr:
        if "serving http://127.0.0.1:" in line:
            return server, int(line.split("127.0.0.1:")[1].split(",")[0])
    raise RuntimeError("the server did not start")


async def main() -> None:
    async with ff.Worker(app):
        client = await app.client()
        key = await client.engine.create_api_key("consumer", ["read"])
        server, port = await asyncio.to_thread(start_server)
        try:
            consumer = Consumer(port, key.key.reveal())
            await asyncio.to_thread(consumer.connect)
            for order in (1, 2):
                run = await ship.options(tags={"order": str(order)}).submit(order)
                await run.result()
            for event in await asyncio.to_thread(consumer.take, 2):
                print(f"order {event['tags']['order']}: {event['outcome']}")
            consumer.cut()
            print("the connection is cut")
            for order in (3, 4):
                run = await ship.options(tags={"order": str(order)}).submit(order)
                await run.result()
            await asyncio.to_thread(consumer.connect)
            for event in await asyncio.to_thread(consumer.take, 2):
                print(f"order {event['tags']['order']}: {event['outcome']}")
            consumer.cut()
        finally:
            await client.engine.revoke_api_key(key.key_id)  # the next run makes its own
            server.terminate()
            await asyncio.to_thread(server.communicate)
        print("the server ends with", server.returncode)


if __name__ == "__main__":
    asyncio.run(main())
