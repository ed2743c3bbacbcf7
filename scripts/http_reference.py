"""Writes the reference page of the HTTP server from the table of operations.

    python scripts/http_reference.py           write docs/reference/http.md
    python scripts/http_reference.py --check   change nothing; exit 1 if the page differs

The text comes from the docstrings of handlers and records.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flowfabric.server import problems
from flowfabric.server.openapi import document
from flowfabric.server.operation import ROUTES, Operation
from flowfabric.server.operations import OPERATIONS
from flowfabric.server.schemas import Schema, described

TARGET = Path(__file__).resolve().parent.parent / "docs" / "reference" / "http.md"
_INTRODUCTION = """\
# HTTP

<!-- Written by scripts/http_reference.py from the table of operations. Edit the docstrings of its handlers. -->

`flowfabric server` offers these operations; `GET /openapi.json` returns the same as an OpenAPI 3.1 document. Every
operation names the scope that its API key needs (`admin` includes all); send the key as
`Authorization: Bearer ffk_<id>_<secret>`. Guides: [the first requests](../guides/run-a-server.md#the-first-requests),
[keys, scopes and namespaces](../guides/keys-scopes-namespaces.md), [follow
events](../guides/follow-events-over-http.md).
"""
_RULES = """\
## Rules

| what | how |
|---|---|
| instants | RFC 3339 in UTC: `2030-01-31T12:00:00Z`; in a request with any offset |
| durations | numbers of seconds, under a name that ends in `_seconds` |
| ids | UUIDs |
| payloads | JSON values; text that is not JSON as a string, other bytes as `{"base64": "...", "encoding": "..."}`; \
in requests such bytes are the member `input` |
| arguments of a task | an object by the names of its parameters: `{"draft_id": 42}` |
| one of several records | the member `status` says which, in snake_case: `"status": "created"` |
| unknown members | of a request: refused by name; of a response: ignore them |
| lists | `items` and `next_cursor`, also in the header `Link` (`rel="next"`); a cursor is refused with other filters |
| versions | `ETag` on records and lists, 304 for `If-None-Match`; `If-Match` where an operation says so, else 412 |
| repeats | `Idempotency-Key` on every POST. Submissions, flows, signals and usage store it with what they make: a \
repeat returns that, whatever its body. Other operations refuse it with another body (422) and while the first is \
under way (409); after a 412, repeat the request with the current tag and the same key |
| bodies | at most the bytes that the operation says; longer ones are refused (413) while they are read, \
compressed ones always (415) |
| request ids | every response has `X-Request-Id`; a problem has it as `instance`, except that of a link, \
whose problem is the same for every reason |

## Problems

Every refusal is `application/problem+json` (RFC 9457):

```json
{
  "type": "/problems/invalid_request", "title": "Invalid request", "status": 422, "detail": "/priority: got string",
  "instance": "3f30f5465caf40fb99b4518b5f079477", "code": "invalid_request", "kind": "invalid_request",
  "family": "http", "retryable": false,
  "errors": [{"pointer": "/priority", "detail": "got string", "allowed": "integer or null"}]
}
```

`code` is for programs, `retryable` says whether repeating the request can succeed, `errors` has every wrong
member: of the body by its JSON pointer, of the path, the query or the headers as `parameter`. 429 and 503 have
`Retry-After`. `GET` of the `type` explains the code:

"""


def page() -> str:
    """Return the whole page."""
    whole = document(OPERATIONS)
    lines = [_INTRODUCTION, *_contents(), _RULES, "| code | meaning |", "|---|---|"]
    lines += [f"| `{code}` | {_cell(text)} |" for code, text in sorted(problems.codes().items())]
    chapters: dict[str, list[Operation]] = {}
    for one in OPERATIONS:
        chapters.setdefault(one.chapter, []).append(one)
    for chapter, operations in chapters.items():
        words = described(sys.modules[f"{ROUTES}.{chapter}"])
        lines += ["", f"## {chapter.capitalize()}", "", words, ""]
        for one in operations:
            lines += _operation(one, whole)
    lines += ["", "## Records", ""]
    for name, schema in sorted(whole["components"]["schemas"].items()):
        lines += _record(name, schema)
    text = "\n".join(lines).strip() + "\n"
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text


def _contents() -> Iterator[str]:
    yield "| operation | | scope |"
    yield "|---|---|---|"
    for one in OPERATIONS:
        summary = described(one.handler).splitlines()[0]
        yield f"| [`{one.method} {one.path}`](#{one.name}) | {_cell(summary)} | {one.scope or 'none'} |"
    yield ""


def _operation(one: Operation, whole: dict[str, Any]) -> Iterator[str]:
    made = whole["paths"][one.path][one.method.lower()]
    yield f"### {one.name}"
    yield ""
    yield f"`{one.method} {one.path}`"
    yield ""
    yield f"{made['summary']}."
    yield ""
    yield str(made["description"])
    yield ""
    if made["parameters"]:
        yield "| parameter | in | type | |"
        yield "|---|---|---|---|"
        for each in made["parameters"]:
            words = _cell(" ".join(filter(None, (each["description"], _default(each["schema"])))))
            yield f"| `{each['name']}` | {each['in']} | {_type(each['schema'])} | {words} |"
        yield ""
    if "requestBody" in made:
        schema = made["requestBody"]["content"]["application/json"]["schema"]
        may = "" if made["requestBody"]["required"] else " It may be left out."
        size = f"{one.limit // 1024} KiB" if one.limit < 1024 * 1024 else f"{one.limit // (1024 * 1024)} MiB"
        yield f"Body: {_type(schema)}, at most {size}.{may}"
        yield ""
    answers = []
    for status, answer in made["responses"].items():
        if int(status) in one.answers:
            content = next(iter(answer.get("content", {}).items()), None)
            answers.append(f"{status} " + ("without a body" if content is None else _content(*content)))
    others = [status for status in made["responses"] if int(status) not in one.answers]
    if "304" in others:
        answers.append("304 without a body")
    refusals = ", ".join(status for status in others if status != "304")
    yield f"Returns {'; '.join(answers)}. Refusals: {refusals}."
    yield ""


def _content(media: str, content: dict[str, Any]) -> str:
    if not media.startswith("application/json"):
        return f"`{media}`"
    schema = content["schema"]
    if "items" in schema.get("properties", {}) and "next_cursor" in schema["properties"]:
        return f"a page of {_type(schema['properties']['items']['items'])}"
    return _type(schema)


def _record(name: str, schema: Schema) -> Iterator[str]:
    yield f"### {name}"
    yield ""
    if words := schema.get("description"):
        yield words
        yield ""
    members = schema.get("properties", {})
    if not members:
        return
    required = schema.get("required", ())
    yield "| member | type | |"
    yield "|---|---|---|"
    for member, each in members.items():
        notes = "" if member in required else _default(each) or "may be left out"
        yield f"| `{member}` | {_type(each)} | {notes} |"
    yield ""


def _type(schema: Schema) -> str:
    if ref := schema.get("$ref"):
        name = ref.rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{one}`" for one in schema["enum"])
    for word in ("anyOf", "oneOf"):
        if word in schema:
            return " or ".join(_type(one) for one in schema[word])
    kind = schema.get("type", "any JSON")
    if isinstance(kind, list):
        return " or ".join(kind)
    if kind == "array":
        return f"array of {_type(schema['items'])}" if "items" in schema else "array"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type(schema['additionalProperties'])}"
    if form := schema.get("format"):
        return {"date-time": "instant", "uuid": "UUID"}.get(form, kind)
    bounds = [
        words.format(schema[name])
        for name, words in (
            ("minimum", "from {}"), ("exclusiveMinimum", "above {}"), ("maximum", "to {}"),
            ("maxLength", "to {} characters"), ("maxItems", "to {} items"),
        )
        if name in schema
    ]  # fmt: skip
    return " ".join([str(kind), *bounds])


def _default(schema: Schema) -> str:
    if "default" not in schema or schema["default"] in ([], {}, (), ""):
        return ""
    value = schema["default"]
    return f"Default: `{value}`." if not isinstance(value, bool) else f"Default: `{str(value).lower()}`."


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def main() -> int:
    """Write the page, or check it."""
    text = page()
    if "--check" in sys.argv[1:]:
        return int(TARGET.read_text(encoding="utf-8") != text)
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
