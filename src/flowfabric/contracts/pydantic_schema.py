"""The JSON schema of what pydantic certainly refuses, in its lax mode.

Pydantic reads `"yes"` as a boolean, `"12.50"` as a number and seconds as a time, and a validator may change a value
before it is looked at. Its own JSON schemas describe what it writes, so this one is made from its core schema: which
values are objects, lists and single values, and which fields must be there. Everything else is left to the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from flowfabric.contracts.json_types import adapter_of

_TEXT: Final = ["string"]
_VALUE: Final = ["string", "number", "boolean"]
# Kinds that are written as one value: what pydantic may read, and in words what it wants.
_SINGLE: Final[dict[str, tuple[list[str], str]]] = {
    "bool": (_VALUE, "true or false"),
    "int": (_VALUE, "an integer"),
    "float": (_VALUE, "a number"),
    "decimal": (_VALUE, "a decimal number"),
    "date": (_VALUE, "a date"),
    "time": (_VALUE, "a time"),
    "datetime": (_VALUE, "a date and time"),
    "timedelta": (_VALUE, "a duration such as P1DT2H"),
    "uuid": (_TEXT, "a UUID"),
    "url": (_TEXT, "a URL"),
    "multi-host-url": (_TEXT, "a URL"),
    "bytes": (_TEXT, "text"),
}
_BOUNDS: Final = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
# Schemas that wrap another one and refuse at least as much: the key under which they have it.
_WRAPPERS: Final = {
    "function-after": "schema",
    "definitions": "schema",
    "default": "schema",
    "json-or-python": "json_schema",
    "lax-or-strict": "lax_schema",
}


def pydantic_schema(cls: type) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a JSON schema of a type that pydantic reads, and its definitions."""
    reader = _Reader()
    schema = reader.of(adapter_of(cls).core_schema, {})
    return schema, reader.definitions


class _Reader:
    """Translates one core schema. A schema of `{}` refuses nothing."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}
        self._cores: dict[str, Any] = {}  # by the reference
        self._names: dict[str, str] = {}

    def of(self, core: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        kind = core["type"]
        if kind == "definitions":
            self._cores |= {each["ref"]: each for each in core["definitions"]}
        if kind == "default" and core.get("on_error", "raise") != "raise":
            return {}
        if kind in _WRAPPERS:
            return self.of(core[_WRAPPERS[kind]], config)
        if kind in _SINGLE:
            types, words = _SINGLE[kind]
            return {"type": types, "title": words, **_bounds(core)}
        made = _KINDS.get(kind)
        return {} if made is None else made(self, core, config)

    def _text(self, core: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        takes_numbers = core.get("coerce_numbers_to_str", config.get("coerce_numbers_to_str"))
        return {"type": ["string", "number"] if takes_numbers else "string"}

    def _literal(self, core: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
        return _texts(core["expected"])

    def _enum(self, core: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
        return {} if core.get("missing") is not None else _texts([each.value for each in core["members"]])

    def _nullable(self, core: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        return _any_of([{"type": "null"}, self.of(core["schema"], config)])

    def _union(self, core: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        choices = core["choices"]
        plain = [*choices.values()] if isinstance(choices, Mapping) else choices
        if any(isinstance(each, str) for each in plain):  # another tag for the same choice
            return {}
        return _any_of([self.of(each[0] if isinstance(each, tuple) else each, config) for each in plain])

    def _list(self, core: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        items = core.get("items_schema")
        found = {} if items is None or core["type"] == "tuple" else self.of(items, config)
        return {"type": "array", **({"items": found} if found else {})}

    def _dict(self, core: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        values = core.get("values_schema")
        found = {} if values is None else self.of(values, config)
        return {"type": "object", **({"additionalProperties": found} if found else {})}

    def _model(self, core: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
        return {} if core.get("custom_init") else self.of(core["schema"], core.get("config", {}))

    def _fields(self, core: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        # A field with an alias is read by both names: it may be missing under either.
        fields = {name: each for name, each in core["fields"].items() if each.get("validation_alias") is None}
        known = {name: self.of(each["schema"], config) for name, each in fields.items()}
        required = [name for name, each in fields.items() if not _has_default(each["schema"])]
        extra = core.get("extra_behavior", config.get("extra_fields_behavior"))
        is_closed = extra == "forbid" and len(fields) == len(core["fields"])
        return {
            "type": "object",
            "properties": known,
            **({"required": required} if required else {}),
            **({"additionalProperties": False} if is_closed else {}),
        }

    def _reference(self, core: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        ref = core["schema_ref"]
        if ref not in self._names:
            # The references hold addresses in memory; names must be the same in every process.
            cls = self._cores[ref].get("cls")
            base = "".join(letter if letter.isalnum() else "_" for letter in getattr(cls, "__name__", "Value"))
            taken = sum(1 for name in self._names.values() if name.rstrip("_0123456789") == base)
            name = self._names[ref] = base if not taken else f"{base}_{taken + 1}"
            self.definitions[name] = {}
            self.definitions[name] = self.of(self._cores[ref], config)
        return {"$ref": f"#/$defs/{self._names[ref]}"}


_KINDS: Final[dict[str, Callable[[_Reader, Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]]] = {
    "none": lambda *_: {"type": "null"},
    "str": _Reader._text,
    "literal": _Reader._literal,
    "enum": _Reader._enum,
    "nullable": _Reader._nullable,
    "union": _Reader._union,
    "tagged-union": _Reader._union,
    **dict.fromkeys(("list", "tuple", "set", "frozenset"), _Reader._list),
    "dict": _Reader._dict,
    "model": _Reader._model,
    "model-fields": _Reader._fields,
    "definition-ref": _Reader._reference,
}


def _bounds(core: Mapping[str, Any]) -> dict[str, Any]:
    """Return the bounds of a number, which hold for texts too, but are only checked for numbers."""
    if core["type"] not in ("int", "float"):
        return {}
    return {word: core[name] for name, word in _BOUNDS.items() if type(core.get(name)) in (int, float)}


def _texts(values: list[Any]) -> dict[str, Any]:
    return {"enum": values} if values and all(type(each) is str for each in values) else {}


def _any_of(members: list[dict[str, Any]]) -> dict[str, Any]:
    return {"anyOf": members} if all(members) else {}


def _has_default(core: Mapping[str, Any]) -> bool:
    while core["type"] != "default":
        if "schema" not in core:
            return False
        core = core["schema"]
    return True
