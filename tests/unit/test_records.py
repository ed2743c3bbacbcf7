"""Records: frozen values, and handles that survive a journey as bytes."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import struct
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric import values
from flowfabric.errors import Corruption, InvalidInput
from flowfabric.values.event import EventCursor
from flowfabric.values.execution import NewExecution
from flowfabric.values.grant import ClaimGrant, ReclaimGrant, ResumeGrant
from flowfabric.values.ids import ExecutionId
from flowfabric.values.lease import Fence, Handle, HandleKind, Operator
from flowfabric.values.page import Page

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
HANDLES = st.builds(
    Handle,
    partition=st.integers(0, 65_535),
    uuid=st.uuids(),
    attempt_index=st.integers(0, 2**31 - 1),
    attempt_id=st.uuids(),
    lease_id=st.uuids(),
    lease_epoch=st.integers(0, 2**63 - 1),
    lease_ttl=st.integers(0, 10**13).map(lambda ms: timedelta(milliseconds=ms)),
    lane_id=TEXT,
    worker_instance_id=TEXT,
    kind=st.sampled_from(HandleKind),
)
HANDLE = Handle(
    partition=7,
    uuid=UUID(int=1),
    attempt_index=2,
    attempt_id=UUID(int=3),
    lease_id=UUID(int=4),
    lease_epoch=5,
    lease_ttl=timedelta(seconds=30),
    lane_id="lane",
    worker_instance_id="worker-1",
    kind=HandleKind.RECLAIMED,
)
# Where the numbers lie: behind three bytes of head, and texts with their length before them.
_AFTER_ID = 3 + 8 + 4 + 36
_AFTER_UUIDS = _AFTER_ID + 8 + 2 * (4 + 36)


@given(HANDLES)
def test_a_handle_survives_as_bytes(handle: Handle) -> None:
    again = Handle.decode(handle.encode())
    assert again == handle
    assert type(again.kind) is HandleKind
    assert again.encode() == handle.encode()


def test_the_bytes_of_a_handle_do_not_change_between_releases() -> None:
    data = HANDLE.encode()
    assert data[:3] == b"\x02\x02\x03"
    assert data[3:_AFTER_ID] == struct.pack("<QI", 7, 36) + b"00000000-0000-0000-0000-000000000001"
    assert data[_AFTER_ID : _AFTER_ID + 8] == struct.pack("<Q", 2)
    assert data[_AFTER_UUIDS : _AFTER_UUIDS + 16] == struct.pack("<QQ", 5, 30_000)
    assert data.endswith(struct.pack("<I", 4) + b"lane" + struct.pack("<I", 8) + b"worker-1")
    assert Handle.decode(bytearray(data)) == Handle.decode(memoryview(data)) == HANDLE  # type: ignore[arg-type]


def _with(offset: int, patch: bytes) -> bytes:
    data = HANDLE.encode()
    return data[:offset] + patch + data[offset + len(patch) :]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x02",
        _with(0, b"\x01"),
        _with(1, b"\x01"),
        _with(2, b"\x04"),
        _with(2, b"\xff"),
        HANDLE.encode() + b"\0",
        HANDLE.encode()[:-1],
        _with(3, struct.pack("<Q", 65_536)),
        _with(11, struct.pack("<I", 2**32 - 1)),
        _with(15, b"z"),
        _with(15, b"\xff"),
        _with(_AFTER_ID, struct.pack("<Q", 2**31)),
        _with(_AFTER_UUIDS, struct.pack("<Q", 2**63)),
        _with(_AFTER_UUIDS + 8, struct.pack("<Q", 10**13 + 1)),
        _with(_AFTER_UUIDS + 8, struct.pack("<Q", 2**64 - 1)),
        _with(_AFTER_ID + 12, b"z"),
        b"text",
    ],
)
def test_bytes_that_are_no_handle_are_corruption(data: bytes) -> None:
    with pytest.raises(Corruption) as refused:
        Handle.decode(data)
    assert refused.value.detail.startswith("handle_codec:")


@pytest.mark.parametrize("data", [None, "text", 5.0, object()])
def test_a_handle_that_is_not_bytes_is_corruption_too(data: Any) -> None:
    with pytest.raises(Corruption):
        Handle.decode(data)


@given(st.binary(max_size=200) | st.tuples(st.integers(0, 2**14), st.binary(max_size=4)).map(lambda p: _with(*p)))
def test_no_bytes_whatsoever_break_the_decoder(data: bytes) -> None:
    try:
        handle = Handle.decode(data)
    except Corruption:
        return
    assert 0 <= handle.partition <= 65_535
    assert 0 <= handle.attempt_index < 2**31
    assert 0 <= handle.lease_epoch < 2**63


def test_a_handle_names_its_execution_and_its_fence() -> None:
    assert HANDLE.execution_id == ExecutionId(UUID(int=1))
    assert HANDLE.fence == Fence(
        execution_id=HANDLE.execution_id,
        lease_id=HANDLE.lease_id,  # type: ignore[arg-type]
        lease_epoch=5,
        attempt_id=HANDLE.attempt_id,  # type: ignore[arg-type]
        attempt_index=2,
    )


def test_every_record_is_frozen() -> None:
    modules = [
        importlib.import_module(f"{values.__name__}.{found.name}") for found in pkgutil.iter_modules(values.__path__)
    ]
    records = [
        value
        for module in modules
        for name, value in inspect.getmembers(module, inspect.isclass)
        if issubclass(value, msgspec.Struct) and value.__module__ == module.__name__ and name[0] != "_"
    ]
    assert len(records) > 30
    assert [record.__name__ for record in records if not record.__struct_config__.frozen] == []


def test_an_operator_overrides_unless_it_says_on_whose_behalf() -> None:
    assert Operator(HANDLE.execution_id).source == "operator_override"
    assert Operator(HANDLE.execution_id, "flow_cascade").source == "flow_cascade"


def test_only_the_kind_of_a_new_execution_is_required() -> None:
    required = [field.name for field in msgspec.structs.fields(NewExecution) if field.required]
    assert required == ["execution_kind"]
    item = NewExecution(execution_kind="k")
    assert (item.lane_id, item.namespace, item.input_payload, item.priority) == ("default", "", b"", 0)


@given(st.builds(EventCursor, st.integers(0, 2**63 - 1), st.integers(0, 2**32 - 1)))
def test_an_event_cursor_survives_as_bytes(cursor: EventCursor) -> None:
    data = cursor.encode()
    assert (len(data), data[0]) == (13, 2)
    assert EventCursor.decode(data) == cursor
    assert EventCursor.decode(data[:9]) == EventCursor(cursor.position), "without an epoch: of the first one"


@given(st.binary(max_size=20))
def test_other_bytes_are_no_event_cursor(data: bytes) -> None:
    try:
        found = EventCursor.decode(data)
    except InvalidInput as error:
        assert error.field == "cursor"
    else:
        assert found.encode()[: len(data)] == data


@pytest.mark.parametrize(
    "data", [b"", b"\x01" + bytes(8), b"\x02" + b"\xff" * 8, b"\x02" + bytes(9), bytes(13), "x", None]
)
def test_bytes_of_something_else_are_refused(data: Any) -> None:
    with pytest.raises(InvalidInput):
        EventCursor.decode(data)


def test_a_cursor_begins_at_the_beginning_and_a_page_without_one_is_the_last() -> None:
    assert EventCursor() == EventCursor(0, 0)
    assert Page(()).next_cursor is None


@pytest.mark.parametrize("cls", [ClaimGrant, ResumeGrant, ReclaimGrant])
def test_a_grant_does_not_print_its_key(cls: Any) -> None:
    fields = {
        "execution_id": HANDLE.execution_id,
        "grant_key": "pg:secret",
        "expires_at": datetime.now(UTC),
    }
    grant = cls(**fields) if cls is ClaimGrant else cls(**fields, lane_id="l")
    assert "secret" not in repr(grant)
    assert "secret" not in f"{grant}"
    assert repr(grant).startswith(f"{cls.__name__}(")
