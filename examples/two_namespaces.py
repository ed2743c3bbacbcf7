"""Two customers on one server: the API key of each reaches its own namespace, and the other's does not exist for it."""

import asyncio
import uuid

import httpx

import flowfabric as ff
from flowfabric.server import create_app
from flowfabric.server.keys import ApiKeyCache

app = ff.App()


@app.task
async def invoice(amount: int) -> str:
    return f"an invoice over {amount}"


async def main() -> None:
    async with app, ff.Worker(app):
        engine = (await app.client()).engine
        web = create_app(engine, keys=ApiKeyCache(engine))
        clients, keys = {}, []
        for name in ("acme", "initech"):
            made = await engine.create_api_key(name, ["submit", "read", "operate"], namespaces=[name])
            keys.append(made.key_id)
            clients[name] = httpx.AsyncClient(
                transport=httpx.ASGITransport(web),
                base_url="https://flows.example",
                headers={"Authorization": f"Bearer {made.key.reveal()}"},
            )

        # The namespace of a key that has one is implied.
        task = {"execution_kind": "invoice", "arguments": {"amount": 100}, "idempotency_key": "march"}
        ids = {
            name: (await client.post("/v1/executions", json=task)).json()["execution_id"]
            for name, client in clients.items()
        }
        print("the same key, two executions:", ids["acme"] != ids["initech"])

        for name, client in clients.items():
            outcome = (await client.get(f"/v1/executions/{ids[name]}/outcome", params={"wait": 10})).json()
            listed = (await client.get("/v1/executions")).json()["items"]
            print(f"{name}:", outcome["result"], "- sees", len(listed))

        acme = clients["acme"]
        foreign = await acme.get(f"/v1/executions/{ids['initech']}")
        unknown = await acme.get(f"/v1/executions/{uuid.uuid4()}")
        print("foreign:", foreign.status_code, "- unknown:", unknown.status_code)
        cancelled = await acme.post(f"/v1/executions/{ids['initech']}/cancel")
        elsewhere = await acme.post("/v1/executions", json={**task, "namespace": "initech"})
        print("cancel it:", cancelled.status_code, "- submit there:", elsewhere.status_code)
        for client in clients.values():
            await client.aclose()
        for key_id in keys:  # the next run makes its own
            await engine.revoke_api_key(key_id)


if __name__ == "__main__":
    asyncio.run(main())
