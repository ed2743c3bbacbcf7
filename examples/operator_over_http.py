"""An operator's day over HTTP: a budget, a quota, a priority, a replay, and what the audit log says about it."""

import asyncio
import json
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from typing import Any

import flowfabric as ff


class Server:
    """Calls by the reference alone: a program in any language can make them."""

    def __init__(self, port: int, key: str) -> None:
        self.port, self.key = port, key

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[Any, dict[str, str]]:
        given = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json", **headers}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v1{path}", data, given, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer), dict(answer.headers)
        except urllib.error.HTTPError as refusal:
            with refusal:
                return json.load(refusal), dict(refusal.headers)


def operate(server: Server) -> None:
    today = uuid.uuid4().hex[:8]
    budget, _ = server.call("POST", "/budgets", {"name": f"acme {today}", "hard_limits": {"tokens": 1000}})
    path = f"/budgets/{budget['budget_id']}"
    for invoice in ("17", "17", "18"):  # the first is sent twice; its key makes it count once
        counted, _ = server.call("POST", f"{path}/usage", {"usage": {"tokens": 600}}, **{"Idempotency-Key": invoice})
        print(f"invoice {invoice}: {counted['status']}")
    read, headers = server.call("GET", path)
    raised, _ = server.call("PATCH", path, {"raise_by": {"tokens": 500}}, **{"If-Match": headers["etag"]})
    print(f"raised from {read['hard_limits']['tokens']} to {raised['hard_limits']['tokens']}")
    stale, _ = server.call("PATCH", path, {"raise_by": {"tokens": 500}}, **{"If-Match": headers["etag"]})
    print(f"raised again, based on the budget as it was: {stale['status']} {stale['code']}")

    quota, _ = server.call("POST", "/quotas", {"name": f"api {today}", "max_concurrent": 1})
    run, _ = server.call("POST", "/executions", {"execution_kind": "report", "arguments": {"month": 11}})
    execution = f"/executions/{run['execution_id']}"
    slot, _ = server.call("POST", f"/quotas/{quota['quota_policy_id']}/admissions/{run['execution_id']}", {})
    print(f"a slot of the quota: {slot['status']}")
    server.call("DELETE", f"/quotas/{quota['quota_policy_id']}/admissions/{run['execution_id']}")

    server.call("PUT", f"{execution}/priority", {"priority": 900})
    print(f"priority: {server.call('GET', execution)[0]['priority']}")
    server.call("POST", f"{execution}/cancel", {"reason": "the wrong month"})
    server.call("POST", f"{execution}/replay", {})
    print(f"cancelled and replayed: {server.call('GET', f'{execution}/state')[0]['public_state']}")

    audit, _ = server.call("GET", "/audit?limit=100")
    for entry in sorted(audit["items"], key=lambda one: one["seq"]):
        print(f"{entry['actor']}: {entry['operation']} {entry['outcome']}")


def start_server() -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-m", "flowfabric.cli", "server", "--listen", "127.0.0.1:0", "--no-access-log"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    for line in server.stderr:
        if "serving http://127.0.0.1:" in line:
            return server, int(line.split("127.0.0.1:")[1].split(",")[0])
    raise RuntimeError("the server did not start")


async def main() -> None:
    async with await ff.Engine.connect() as engine:
        key = await engine.create_api_key("ada", ["admin"])
        server, port = await asyncio.to_thread(start_server)
        try:
            await asyncio.to_thread(operate, Server(port, key.key.reveal()))
        finally:
            await engine.revoke_api_key(key.key_id)  # the next run makes its own
            server.terminate()
            await asyncio.to_thread(server.communicate)


if __name__ == "__main__":
    asyncio.run(main())
