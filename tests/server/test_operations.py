"""The table of operations is whole, and everything that is made from it agrees with it."""

from __future__ import annotations

import inspect
import re
from typing import Any, get_type_hints
from urllib.parse import quote
from uuid import uuid4

import httpx
import jsonschema
from msgspec.structs import fields
from starlette.applications import Starlette
from starlette.routing import Mount

import flowfabric as ff
from flowfabric.errors import NotFound
from flowfabric.server.answers import union_members
from flowfabric.server.openapi import document, statuses
from flowfabric.server.operation import CONTROL, Empty, Repeats, Scope, Within
from flowfabric.server.operations import BY_NAME, NOT_BEHIND_HTTP, OPERATIONS
from flowfabric.server.parameters import WORDS
from flowfabric.server.requests import Reader
from tests.docs.pages import ROOT, load
from tests.each import Rows
from tests.server.conftest import MakeClient
from tests.server.examples import request_of
from tests.server.keyed import Keyed

DOCUMENT = document(OPERATIONS)


def test_every_operation_of_the_engine_is_behind_http_or_has_a_reason_not_to_be() -> None:
    engine = {name for name, one in inspect.getmembers(ff.Engine) if not name.startswith("_") and callable(one)}
    offered = {name for one in OPERATIONS for name in one.engine}
    assert engine - offered - NOT_BEHIND_HTTP.keys() == set()
    assert offered - engine == set()
    assert NOT_BEHIND_HTTP.keys() - engine == set()
    assert NOT_BEHIND_HTTP.keys() & offered == set()


def test_names_and_paths_are_unique() -> None:
    assert len(BY_NAME) == len(OPERATIONS)
    places = [(one.method, re.sub(r"\{\w+\}", "{}", one.path)) for one in OPERATIONS]
    assert len(set(places)) == len(places)


def test_every_operation_is_described_and_consistent() -> None:
    rows = Rows()
    for one in OPERATIONS:
        with rows.row(one.name):
            words = inspect.cleandoc(one.handler.__doc__ or "")
            assert words.splitlines()[0].endswith("."), "the first line of the docstring is the summary"
            assert one.answers
            assert "return" in get_type_hints(one.handler)
            if one.method == "GET":
                assert one.body is None
                assert one.repeats is Repeats.SAFE
            elif one.method == "POST":
                assert one.repeats is not Repeats.SAFE, "a POST heeds Idempotency-Key"
            if one.chapter != "links":  # pages for people, whose browsers send what they like
                assert one.body is None or one.body.__struct_config__.forbid_unknown_fields, one.body
                assert one.query.__struct_config__.forbid_unknown_fields, one.query
            assert one.limit >= CONTROL
            if one.within is Within.EXECUTION:
                assert "{execution_id}" in one.path
            if one.within is Within.FLOW:
                assert "{flow_id}" in one.path
            if one.within is Within.GIVEN:
                named = {each.name for record in (one.query, one.body or Empty) for each in fields(record)}
                assert "namespace" in named
            if one.scope is None:
                assert not one.path.startswith("/v1/") or one.within is Within.NONE
    rows.tell()


def test_no_request_has_a_clock_a_partition_or_an_id_of_its_path() -> None:
    clock = {"now", "now_ms", "time", "timestamp", "created_at", "partition", "partition_id", "partition_key"}
    rows, nested = Rows(), 0
    for one in OPERATIONS:
        with rows.row(one.name):
            records = [one.query, *([one.body] if isinstance(one.body, type(Empty)) else [])]
            given = {each.encode_name for record in records for each in fields(record)}
            assert given & {*clock, *Reader(one).names} == set()
            shown = DOCUMENT["paths"][one.path][one.method.lower()]
            everywhere = members(shown.get("requestBody")) | members(shown.get("parameters"))
            assert everywhere & clock == set()
            nested += not everywhere <= given
    rows.tell()
    assert nested > 5


def members(schema: Any) -> set[str]:
    """The names of all members that a schema has, at any depth."""
    found: set[str] = set()
    seen: set[str] = set()

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            found.update(node.get("properties", ()))
            if (name := node.get("$ref")) is not None and name not in seen:
                seen.add(name)
                walk(DOCUMENT["components"]["schemas"][name.rpartition("/")[2]])
        for each in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            walk(each)

    walk(schema)
    return found


def test_every_union_of_records_says_by_status_which_it_is() -> None:
    components = DOCUMENT["components"]["schemas"]
    found = 0

    def walk(node: Any) -> None:
        nonlocal found
        for member in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            walk(member)
        if isinstance(node, dict):
            choices = [one["$ref"] for one in node.get("oneOf", node.get("anyOf", ())) if "$ref" in one]
            if len(choices) > 1:
                words = [components[one.rpartition("/")[2]]["properties"]["status"]["const"] for one in choices]
                assert len(set(words)) == len(words)
                assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", one) for one in words), words
                found += 1

    walk(DOCUMENT)
    assert found > 5


def test_answers_with_an_id_link_to_the_operations_that_take_it() -> None:
    links = {
        (operation["operationId"], status): answer["links"]
        for methods in DOCUMENT["paths"].values()
        for operation in methods.values()
        for status, answer in operation["responses"].items()
        if "links" in answer
    }
    for (_, _), found in links.items():
        for name, link in found.items():
            ((parameter, place),) = link["parameters"].items()
            assert BY_NAME[name].path.count("{") == 1
            assert f"{{{parameter.removeprefix('path.')}}}" in BY_NAME[name].path
            assert place.endswith(parameter.removeprefix("path."))
    submitted = links["submit_execution", "201"]
    assert submitted["cancel_execution"]["parameters"] == {"path.execution_id": "$response.body#/execution_id"}
    takers = {one.name for one in OPERATIONS if re.findall(r"{(\w+)}", one.path) == ["execution_id"]}
    assert set(submitted) == takers
    listed = links["list_flows", "200"]["get_flow"]
    assert listed["parameters"] == {"path.flow_id": "$response.body#/items/0/flow_id"}
    assert {"create_api_key", "create_budget", "create_quota", "cancel_many", "fork_execution"} <= {
        one for one, _ in links
    }


async def test_every_link_leads_to_what_was_made(client: httpx.AsyncClient) -> None:
    rows = Rows()
    count = 0
    for one in OPERATIONS:
        links = DOCUMENT["paths"][one.path][one.method.lower()]["responses"].get("201", {}).get("links", {})
        if "{" in one.path:
            continue  # needs something to begin with; the same links as those that make it without
        for name, link in links.items():
            with rows.row((one.name, name)):
                request = request_of(one, {})
                if one.body is not None and "name" in {each.name for each in fields(one.body)}:
                    request["json"]["name"] = f"for {name}"
                made = await client.request(**request)
                assert made.status_code == 201, made.text
                ((parameter, place),) = link["parameters"].items()
                found = made.json()
                for part in place.removeprefix("$response.body#/").split("/"):
                    found = found[part]
                operation = BY_NAME[name]
                if operation.streams:
                    continue
                answer = await client.request(**request_of(operation, {parameter.removeprefix("path."): found}))
                assert answer.status_code in (*operation.answers, *statuses(operation)), answer.text
                if answer.status_code == 404:
                    assert answer.json()["detail"] != str(NotFound(parameter[5:-3], found))
                count += 1
    rows.tell()
    assert count > 30


async def test_an_answer_says_where_to_read_what_it_made_as_the_document_does(keyed: Keyed) -> None:
    client = await keyed.client("admin")
    transport = httpx.ASGITransport(Starlette(routes=[Mount("/engine", keyed.app)]))
    made = await client.post("/v1/flows", json={"flow_kind": "f"})
    ids = {"name": "a b/c", "flow_id": made.json()["flow_id"]}
    member = await client.post("/v1/executions", json={"execution_kind": "work", "flow_id": ids["flow_id"]})
    ids["execution_id"] = member.json()["execution_id"]
    bodies: dict[str, Any] = {
        "put_schedule": {"execution_kind": "k", "every_seconds": 60},
        "add_flow_member": {"execution_id": ids["execution_id"]},
        "extend_flow": {"nodes": {"n": {"execution_kind": "k"}}},
        "create_budget": {"name": "b"},
        "create_quota": {"name": "q"},
    }
    rows = Rows()
    async with httpx.AsyncClient(transport=transport, base_url="http://server", headers=client.headers) as mounted:
        for one in OPERATIONS:
            responses = DOCUMENT["paths"][one.path][one.method.lower()]["responses"]
            told = {int(status) for status in responses if "Location" in responses[status].get("headers", {})}
            with rows.row(one.name):
                assert told == (set() if one.made is None else {201, 202} & one.answers.keys())
                if one.made is None:
                    continue
                request = request_of(one, {**ids, "name": quote(ids["name"], safe="")})
                request |= {"url": f"/engine{request['url']}", "json": bodies.get(one.name, request["json"])}
                answer = await mounted.request(**request)
                assert answer.status_code in (200, *told), answer.text
                assert answer.headers["location"].startswith("/engine/v1/")
                assert (await mounted.get(answer.headers["location"])).status_code == 200, answer.headers
        page = await mounted.get("/engine/v1/executions?limit=1", headers={"Host": "server/elsewhere"})
        assert page.links["next"]["url"].startswith("/engine/v1/executions?limit=1&cursor=")
        assert (await mounted.get(page.links["next"]["url"])).status_code == 200
    rows.tell()


def test_every_record_and_list_has_an_etag_but_what_is_not_stored_or_waits() -> None:
    without = {one.name for one in OPERATIONS if one.method == "GET" and not (one.etag or one.no_store)}
    assert without == {"get_outcome"}


def test_only_what_heeds_if_match_says_that_it_does() -> None:
    told = {
        operation["operationId"]
        for methods in DOCUMENT["paths"].values()
        for operation in methods.values()
        if any(one["name"] == "If-Match" for one in operation["parameters"]) or "412" in operation["responses"]
    }
    schedules = {"put_schedule", "delete_schedule", "pause_schedule", "resume_schedule"}
    assert told == {"change_priority", "set_lane_state", "update_budget", "update_quota", *schedules}


def test_the_document_is_openapi_that_refers_only_to_what_it_has() -> None:
    assert DOCUMENT["openapi"] == "3.1.0"
    components = DOCUMENT["components"]

    def walk(node: object) -> None:
        if isinstance(node, dict):
            if isinstance(ref := node.get("$ref"), str):
                _, _, kind, name = ref.split("/")
                assert name in components[kind], ref
            for each in node.values():
                walk(each)
        elif isinstance(node, list):
            for each in node:
                walk(each)

    walk(DOCUMENT)
    for schema in components["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    written = {(method.upper(), path) for path, item in DOCUMENT["paths"].items() for method in item}
    assert written == {(one.method, one.path) for one in OPERATIONS}
    for one in OPERATIONS:
        made = DOCUMENT["paths"][one.path][one.method.lower()]
        assert made["summary"]
        assert {int(status) for status in made["responses"]} == {*one.answers, *statuses(one)}
        assert made["security"] == ([] if one.scope is None else [{"key": [one.scope]}])
        assert {each["name"] for each in made["parameters"] if each["in"] == "path"} == set(
            re.findall(r"\{(\w+)\}", one.path)
        )


def test_every_parameter_is_explained_and_no_other() -> None:
    used = set()
    for one in OPERATIONS:
        for parameter in DOCUMENT["paths"][one.path][one.method.lower()]["parameters"]:
            assert parameter["description"].endswith("."), (one.name, parameter["name"])
            used |= {parameter["name"], f"{one.name}.{parameter['name']}"}
    assert WORDS.keys() - used == set()


async def test_the_server_shows_its_document(client_of: MakeClient) -> None:
    answer = await client_of().get("/openapi.json")
    assert answer.status_code == 200
    assert answer.json().keys() == DOCUMENT.keys()
    again = await client_of().get("/openapi.json", headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


async def test_every_refusal_of_the_table_is_a_problem(client_of: MakeClient, client: httpx.AsyncClient) -> None:
    nobody = client_of()
    rows = Rows()
    for one in (one for one in OPERATIONS if one.chapter != "links"):  # they have one answer for every refusal
        with rows.row(one.name):
            path = re.sub(r"\{(\w+)\}", lambda found: "1" if found[1] == "attempt" else str(uuid4()), one.path)
            if one.scope is not None:
                await _is_problem(await nobody.request(one.method, path), 401, "unauthenticated")
            if not one.streams:
                odd = await client.request(one.method, f"{path}?no_such_parameter=1")
                problem = await _is_problem(odd, 422, "invalid_request")
                assert problem["errors"][0]["parameter"] == "no_such_parameter"
            if "_id}" in one.path and "{worker_id}" not in one.path and "{key_id}" not in one.path:
                wrong = await client.request(one.method, re.sub(r"\{(\w+_id)\}", "no-id", path_of(one.path)))
                await _is_problem(wrong, 422, "invalid_request")
            if one.body is not None:
                json = {"no_such_member": 1}
                unknown = await client.request(one.method, path, json=json)
                problem = await _is_problem(unknown, 422, "invalid_request")
                assert "/no_such_member" in {each.get("pointer") for each in problem["errors"]}
                text = await client.request(one.method, path, content=b"x", headers={"Content-Type": "text/plain"})
                await _is_problem(text, 415, "unsupported_media_type")
                broken = await client.request(
                    one.method, path, content=b"{", headers={"Content-Type": "application/json"}
                )
                await _is_problem(broken, 400, "invalid_json")
            if one.method != "GET":
                long = await client.request(one.method, path, content=b" " * (one.limit + 1))
                problem = await _is_problem(long, 413, "body_too_large")
                assert (problem["limit_bytes"], problem["route"]) == (one.limit, one.path)
    rows.tell()


def path_of(template: str) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: found[0] if found[1].endswith("_id") else "1", template)


async def _is_problem(answer: httpx.Response, status: int, code: str) -> dict[str, object]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem: dict[str, object] = answer.json()
    assert problem["code"] == code
    assert problem["type"] == f"/problems/{code}"
    assert problem["title"]
    assert problem["detail"]
    return problem


async def test_records_and_lists_have_an_etag(client: httpx.AsyncClient) -> None:
    made = await client.post("/v1/executions", json={"execution_kind": "work"})
    for path in (made.headers["Location"], "/v1/executions", f"{made.headers['Location']}/attempts"):
        first = await client.get(path)
        same = await client.get(path, headers={"If-None-Match": f'"other", {first.headers["etag"]}'})
        assert (same.status_code, same.content, same.headers["etag"]) == (304, b"", first.headers["etag"])
    await client.post(f"{made.headers['Location']}/cancel")
    changed = await client.get(path, headers={"If-None-Match": first.headers["etag"]})
    assert changed.status_code == 304  # it has no attempt yet
    listed = await client.get("/v1/executions")
    assert listed.headers["etag"] != (await client.get(made.headers["Location"])).headers["etag"]


def test_the_reference_page_is_what_the_table_says() -> None:
    written = (ROOT / "docs" / "reference" / "http.md").read_text(encoding="utf-8")
    assert load(ROOT / "scripts" / "http_reference.py", "http_reference").page() == written, (
        "run scripts/http_reference.py"
    )


def test_scopes_are_those_of_keys() -> None:
    assert {one.scope for one in OPERATIONS if one.scope is not None} <= set(Scope)
    assert all(union_members(answer) for one in OPERATIONS for answer in one.answers.values())
