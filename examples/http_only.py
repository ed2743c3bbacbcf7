"""Submit, follow and approve over HTTP, with nothing but Python's standard library. Any language can do the same.

FLOWFABRIC_URL and FLOWFABRIC_KEY name your server and an API key. Without them the program starts a server of its own
that asks for no key, and a worker for the task `deploy` of two_person_approval.py.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADERS = {"Content-Type": "application/json"}
if key := os.environ.get("FLOWFABRIC_KEY"):
    HEADERS["Authorization"] = f"Bearer {key}"


def call(method: str, url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, HEADERS, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def events(url: str) -> Iterator[dict[str, Any]]:
    """Server-sent events: lines of fields, and an empty line after each event."""
    with urllib.request.urlopen(urllib.request.Request(url, headers=HEADERS), timeout=60) as answer:
        for line in answer:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])


def main(server: str) -> None:
    submission = {"execution_kind": "deploy", "arguments": {"version": "v7"}, "idempotency_key": f"v7-{os.getpid()}"}
    made = call("POST", f"{server}/v1/executions", submission)
    again = call("POST", f"{server}/v1/executions", submission)
    print(made["status"], "and", again["status"], "the same" if made["execution_id"] == again["execution_id"] else "")

    execution = f"{server}/v1/executions/{made['execution_id']}"
    while call("GET", f"{execution}/state")["public_state"] != "suspended":
        time.sleep(0.05)
    waitpoint = call("GET", f"{execution}/pending-waitpoints")["items"][0]
    print("waits for", *waitpoint["required_signal_names"])

    first = call("POST", f"{execution}/approve")
    token = call("GET", f"{execution}/waitpoints/{waitpoint['waitpoint_id']}/token")
    second = call("POST", f"{server}/w/{token['callback']}?name=approved")  # a second person, by a link
    print("first:", first["effect"], "- second:", second["status"])

    outcome = call("GET", f"{execution}/outcome?wait=30")
    print(f"{outcome['public_state']}:", outcome["result"])
    for event in events(f"{server}/v1/events?execution={made['execution_id']}&after=0"):
        what = event["outcome"] or event["signal_effect"] or event["lease_type"] or event["operator_type"]
        print("-", what)
        if event["outcome"]:
            break


@contextlib.contextmanager
def own_server() -> Iterator[str]:
    command = [sys.executable, "-m", "flowfabric.cli"]
    here = Path(__file__).parent
    serve = [*command, "server", "--listen", "127.0.0.1:0", "--auth", "none", "--no-access-log"]
    with subprocess.Popen(serve, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        url = next(found[1] for line in server.stderr if (found := re.search(r"serving (http://[^,\s]+)", line)))
        work = [*command, "worker", "two_person_approval:app", "--log-level", "warning"]
        with subprocess.Popen(work, cwd=here) as worker:
            try:
                yield url
            finally:
                worker.terminate()
                server.terminate()
                server.stderr.read()


if __name__ == "__main__":
    if url := os.environ.get("FLOWFABRIC_URL"):
        main(url)
    else:
        with own_server() as url:
            main(url)
