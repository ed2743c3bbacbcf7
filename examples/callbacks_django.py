"""A payment service calls a Django application back."""

import asyncio
import functools

import django
from django.conf import settings
from django.http import HttpRequest, JsonResponse
from django.test import Client as Service
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

import flowfabric as ff

app = ff.App()
handed_out: asyncio.Queue[str] = asyncio.Queue()


@app.task
async def buy(ctx: ff.Context, cents: int) -> str:
    paid = await ctx.waitpoint("payment")
    await ctx.step("request payment", handed_out.put, f"/callbacks/{paid.callback}")
    signal = await paid.wait(payload=dict[str, str], timeout="1 hour")
    return f"{cents} cents, reference {signal.payload['reference']}"


@functools.cache
def flowfabric_client() -> ff.Client:  # one per process, opened by the first request
    return ff.Client(app)


@csrf_exempt
@require_POST
def receive(request: HttpRequest, callback: str) -> JsonResponse:
    key = request.headers.get("Idempotency-Key")
    received = flowfabric_client().receive(callback, request.body, idempotency_key=key)
    return JsonResponse(received.body, status=received.status)


urlpatterns = [path("callbacks/<str:callback>", receive)]


def call_back(link: str) -> None:
    service = Service(enforce_csrf_checks=True)
    for _ in range(2):  # services repeat their calls
        answer = service.post(link, {"reference": "p-17"}, "application/json", headers={"Idempotency-Key": "p-17"})
        print("POST:", answer.status_code, answer.json()["outcome"])
    flowfabric_client().close()


async def main() -> None:
    settings.configure(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["testserver"], SECRET_KEY="of the example")
    django.setup()
    async with ff.Worker(app):
        run = await buy.submit(990)
        while await run.state() is not ff.State.SUSPENDED:
            await asyncio.sleep(0.05)
        await asyncio.to_thread(call_back, await handed_out.get())
        print(await run.result())


if __name__ == "__main__":
    asyncio.run(main())
