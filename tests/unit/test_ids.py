"""Identifiers: minting, parsing, and the rules for names."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.errors import InvalidInput, ValidationFailed
from flowfabric.values import ids
from flowfabric.values.checks import (
    capability_hash,
    check_key,
    check_lane,
    check_tag_key,
    check_tags,
    check_text,
    check_worker,
    escape_text,
    required_capabilities,
    worker_capabilities,
)
from flowfabric.values.ids import (
    PartitionKey,
    fit_partition,
    id_digits,
    mint_execution_id,
    mint_many,
    mint_uuid,
    parse_execution_id,
    parse_flow_id,
    parse_uuid,
    partition_of_id,
    partition_of_key,
)

SAMPLE = UUID("550e8400-e29b-41d4-a716-446655440000")


def test_minted_uuids_sort_in_mint_order() -> None:
    minted = [mint_uuid() for _ in range(20_000)]
    assert minted == sorted(minted)
    assert len(set(minted)) == len(minted)
    assert {(u.version, u.variant) for u in minted} == {(7, "specified in RFC 4122")}


def test_minted_uuids_keep_growing_when_the_clock_steps_back(monkeypatch: pytest.MonkeyPatch) -> None:
    minter = ids._Minter()
    before = minter.next()
    monkeypatch.setattr("flowfabric.values.ids.time", SimpleNamespace(time_ns=lambda: 1_000_000_000))
    after = [minter.next() for _ in range(100)]
    assert [before, *after] == sorted({before, *after})


def test_minted_uuids_keep_growing_when_a_millisecond_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowfabric.values.ids.time", SimpleNamespace(time_ns=lambda: 1_700_000_000_000_000_000))
    minter = ids._Minter()
    first = minter.next()
    minter._order = 2**58 - 1
    last = minter.next()
    assert last > first
    assert last.version == 7


def test_minted_uuids_carry_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowfabric.values.ids.time", SimpleNamespace(time_ns=lambda: 1_700_000_000_123_999_999))
    assert ids._Minter().next().int >> 80 == 1_700_000_000_123


def test_threads_never_mint_the_same_uuid() -> None:
    minted: list[list[UUID]] = [[] for _ in range(8)]

    def work(mine: list[UUID]) -> None:
        mine.extend(mint_uuid() for _ in range(2_000))

    threads = [threading.Thread(target=work, args=(mine,)) for mine in minted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({u for mine in minted for u in mine}) == 16_000
    assert all(mine == sorted(mine) for mine in minted)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_does_not_repeat_its_parent() -> None:
    mint_uuid()
    context = multiprocessing.get_context("fork")
    with context.Pool(4) as pool:
        minted = pool.map(_mint_many, [500] * 4, chunksize=1)
    here = _mint_many(500)
    everything = [u for batch in [*minted, here] for u in batch]
    assert len(set(everything)) == len(everything)


def _mint_many(count: int) -> list[UUID]:
    return [mint_uuid() for _ in range(count)]


@given(st.uuids(allow_nil=True))
def test_a_uuid_parses_from_its_text_in_either_case(value: UUID) -> None:
    assert parse_uuid(str(value)) == value
    assert parse_uuid(str(value).upper()) == value
    assert parse_uuid(value) is value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "550e8400e29b41d4a716446655440000",
        "{550e8400-e29b-41d4-a716-446655440000}",
        "urn:uuid:550e8400-e29b-41d4-a716-446655440000",
        "550e8400-e29b-41d4-a716-446655440000\n",
        " 550e8400-e29b-41d4-a716-446655440000",
        "550e8400-e29b-41d4-a716-44665544000",
        "550e8400-e29b-41d4-a716-44665544000g",
        "550e84-00e29b-41d4-a716-446655440000",
        5,
        None,
        b"550e8400-e29b-41d4-a716-446655440000",
    ],
)
def test_anything_but_a_hyphenated_uuid_is_refused(text: object) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_uuid(text, "flow_id")
    assert caught.value.field == "flow_id"


def test_the_partition_of_a_key_has_the_check_value_of_the_checksum() -> None:
    assert partition_of_key("", "123456789", 1 << 16) == 0x31C3  # zeros in front change nothing


@pytest.mark.parametrize("parse", [parse_execution_id, parse_flow_id])
@given(value=st.uuids(allow_nil=True), partition=st.integers(0, 65_535))
def test_an_id_survives_its_text(parse: Callable[[object], UUID], value: UUID, partition: int) -> None:
    found = parse(str(value))
    assert found == value
    assert parse(str(value).upper()) == value
    assert parse(value) is value
    # The reference's form is read, whatever partition it names, and never printed.
    assert parse(f"{{fp:{partition}}}:{value}") == value
    assert str(found) == str(value)


@pytest.mark.parametrize("parse", [parse_execution_id, parse_flow_id])
@pytest.mark.parametrize(
    "text",
    [
        "", "x", None, 7, SAMPLE.hex, f" {SAMPLE}", f"{SAMPLE}\n", SAMPLE.bytes,
        "{fp:1", "{fp:1}:", "{fp:1}:nope", f"{{fp:1}}{SAMPLE}", f"{{b:1}}:{SAMPLE}", f"{{FP:1}}:{SAMPLE}",
        f" {{fp:1}}:{SAMPLE}", f"{{fp:}}:{SAMPLE}", f"{{fp:x}}:{SAMPLE}", f"{{fp:-1}}:{SAMPLE}", f"{{fp:+1}}:{SAMPLE}",
        f"{{fp:01}}:{SAMPLE}", f"{{fp:00}}:{SAMPLE}", f"{{fp: 1}}:{SAMPLE}", f"{{fp:1_0}}:{SAMPLE}",
        f"{{fp:65536}}:{SAMPLE}", f"{{fp:100000}}:{SAMPLE}", f"{{fp:\u0661}}:{SAMPLE}", f"{{fp:1}}:{SAMPLE}\n",
        f"{{fp:1}}:{SAMPLE.hex}", f"{{fp:1}}:}}:{SAMPLE}", f"{{fp:1}}:{{fp:1}}:{SAMPLE}",
    ],
)  # fmt: skip
def test_a_text_that_is_no_id_is_refused_with_the_allowed_forms(
    parse: Callable[[object, str], UUID], text: object
) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse(text, "upstream_id")
    assert caught.value.field == "upstream_id"
    assert "UUID" in (caught.value.allowed or "")


def test_the_offending_text_is_quoted_but_not_without_end() -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_execution_id("x" * 100_000)
    assert len(str(caught.value)) < 500


COUNTS = st.integers(1, 65_535)


@given(COUNTS, st.data())
def test_minted_ids_say_the_partition_they_were_minted_for(count: int, data: st.DataObject) -> None:
    partition = data.draw(st.integers(0, count - 1))
    minted = [UUID(bytes=one) for one in mint_many(20, partition, count)]
    assert {partition_of_id(one, count) for one in minted} == {partition}
    assert minted == sorted(set(minted))
    assert {one.version for one in minted} == {7}


def test_ids_grow_strictly_above_the_bits_of_the_partition() -> None:
    minted = [int.from_bytes(one, "big") >> 16 for _ in range(50) for one in mint_many(200, 7, 256)]
    assert all(one < two for one, two in itertools.pairwise(minted))


def test_the_last_bits_of_minted_ids_are_spread() -> None:
    low = Counter(int.from_bytes(one, "big") & 0xFFFF for one in mint_many(40_000))
    assert max(Counter(bits % 256 for bits, n in low.items() for _ in range(n)).values()) < 300, "about 156 each"
    one_partition = {int.from_bytes(one, "big") & 0xFFFF for one in mint_many(10_000, 9, 256)}
    assert one_partition == {9 + 256 * n for n in range(256)}, "all that say it are used"


@given(st.uuids(allow_nil=True), COUNTS, st.data())
def test_an_id_is_made_to_fit(value: UUID, count: int, data: st.DataObject) -> None:
    partition = data.draw(st.integers(0, count - 1))
    fitting = fit_partition(value, partition, count)
    assert partition_of_id(fitting, count) == partition
    assert fitting.int >> 16 == value.int >> 16
    assert fit_partition(fitting, partition, count) == fitting


@given(st.uuids(), COUNTS)
def test_a_flow_member_lives_in_the_partition_of_its_flow(flow: UUID, count: int) -> None:
    member = mint_execution_id(namespace="n", idempotency_key="k", flow_id=flow, count=count)
    assert partition_of_id(member, count) == partition_of_id(flow, count)


@given(st.text(max_size=20), st.text(min_size=1, max_size=20), COUNTS)
def test_a_key_decides_the_partition_of_a_stand_alone_execution(ns: str, key: str, count: int) -> None:
    minted = mint_execution_id(namespace=ns, idempotency_key=key, count=count)
    assert partition_of_id(minted, count) == partition_of_key(ns, key, count)


@pytest.mark.parametrize(
    ("text", "digits"),
    [
        ("9f3c01", "9f3c01"),
        (" 9F3C01a2 ", "9f3c01a2"),
        ("550e8400-e29b", "550e8400e29b"),
        (SAMPLE.hex, SAMPLE.hex),
        (str(SAMPLE), SAMPLE.hex),
        (SAMPLE, SAMPLE.hex),
        (f"{{fp:12}}:{SAMPLE}", SAMPLE.hex),
    ],
)
def test_the_digits_of_an_id_or_a_part_of_it(text: object, digits: str) -> None:
    assert id_digits(text) == digits


@pytest.mark.parametrize("text", ["", "9f3c0", "9-f-3-c-0", "9f3c0g", SAMPLE.hex + "0", None, 7, "{fp:1}:9f3c01a2"])
def test_too_few_digits_or_other_signs_are_refused(text: object) -> None:
    with pytest.raises(InvalidInput, match="at least 6 hex digits"):
        id_digits(text, "ID")


@given(st.sampled_from(["fp", "b", "q"]), st.integers(0, 65_535))
def test_a_partition_key_survives_its_text(family: str, index: int) -> None:
    key = PartitionKey.parse(f"{{{family}:{index}}}")
    assert (key.family, key.index) == (family, index)
    assert str(key) == f"{{{family}:{index}}}"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "MissingBraces"),
        ("{", "MissingBraces"),
        ("fp:7", "MissingBraces"),
        ("{fp:7", "MissingBraces"),
        ("fp:7}", "MissingBraces"),
        (None, "MissingBraces"),
        ("{}", "MalformedBody"),
        ("{fp7}", "MalformedBody"),
        ("{x:7}", "UnknownFamilyPrefix"),
        ("{:7}", "UnknownFamilyPrefix"),
        ("{FP:7}", "UnknownFamilyPrefix"),
        ("{fp:}", "InvalidIndex"),
        ("{fp:-1}", "InvalidIndex"),
        ("{fp:65536}", "InvalidIndex"),
        ("{fp:1:2}", "InvalidIndex"),
        ("{q:x}", "InvalidIndex"),
    ],
)
def test_a_bad_partition_key_says_what_is_wrong(text: object, why: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        PartitionKey.parse(text)
    assert caught.value.problem.startswith(f"{why}: ")
    assert str(caught.value.allowed).startswith("a number from 0 to 65535, or ")


@pytest.mark.parametrize("lane", ["default", "a", "x" * 64, "with space", "~!@#", " "])
def test_printable_ascii_is_a_lane(lane: str) -> None:
    assert check_lane(lane) == lane


@pytest.mark.parametrize(
    ("lane", "why"),
    [
        ("", "Empty"),
        ("x" * 65, "TooLong(65)"),
        ("\u00e9" * 33, "TooLong(66)"),
        ("ab\tc", "NonPrintable(2)"),
        ("caf\u00e9", "NonPrintable(3)"),
        ("a\x7f", "NonPrintable(1)"),
    ],
)
def test_a_bad_lane_says_why(lane: str, why: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_lane(lane)
    assert caught.value.problem.startswith(why)
    assert caught.value.field == "lane_id"


@given(st.text(max_size=80))
def test_a_lane_is_one_to_sixty_four_printable_ascii_bytes(lane: str) -> None:
    good = 1 <= len(lane) <= 64 and all(0x20 <= ord(char) <= 0x7E for char in lane)
    if good:
        assert check_lane(lane) == lane
    else:
        with pytest.raises(InvalidInput):
            check_lane(lane)


@pytest.mark.parametrize("value", ["w", "pool-1", "h\u00f4te:1", "x" * 256, "\u00e9" * 128])
def test_a_worker_name_may_be_any_visible_text(value: str) -> None:
    assert check_worker(value, "worker_instance_id") == value


@pytest.mark.parametrize(
    "value",
    [
        "",
        "a b",
        "a\tb",
        "a\u00a0b",
        "a\u2003b",
        "a\x00b",
        "a\x7f",
        "a\x85",
        "a|b",
        "x" * 257,
        "\ud800",
        None,
        3,
    ],
)
def test_a_worker_name_has_no_space_control_or_bar(value: object) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_worker(value, "worker_instance_id")
    assert caught.value.field == "worker_instance_id"


@pytest.mark.parametrize("value", ["", "any thing\n", "x" * 256, "\u00e9" * 128, "\U0001f600" * 64])
def test_text_may_be_anything_the_database_holds(value: str) -> None:
    assert check_text(value, "namespace") == value


@pytest.mark.parametrize("value", ["a\0b", "\ud800", "x\udfff", "x" * 257, "\u00e9" * 129, 5, None, b"x"])
def test_text_the_database_cannot_hold_is_refused(value: object) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_text(value, "namespace")
    assert caught.value.field == "namespace"
    assert caught.value.allowed


def test_keys_may_be_twice_as_long_and_empty_means_none() -> None:
    assert check_key("k" * 512) == "k" * 512
    assert check_key("") is None
    assert check_key(None) is None
    with pytest.raises(InvalidInput):
        check_key("k" * 513)


@given(st.text(alphabet=st.characters(), max_size=50) | st.text(alphabet="\0\ud800\udfffa\u00e9", max_size=20))
def test_escaped_text_can_always_be_stored(text: str) -> None:
    escaped = escape_text(text)
    assert check_text(escaped, "text", None) == escaped
    assert len(escape_text(text, 10).encode()) <= 10


def test_escaping_keeps_good_text_and_shows_bad_characters() -> None:
    assert escape_text("caf\u00e9 \U0001f600") == "caf\u00e9 \U0001f600"
    assert escape_text("a\0b\ud800") == "a\\x00b\\ud800"
    assert escape_text("\u00e9\u00e9", 3) == "\u00e9"


def test_escaping_survives_a_value_that_cannot_be_shown() -> None:
    class Broken:
        def __str__(self) -> str:
            raise RuntimeError("no")

    assert "Broken" in escape_text(Broken())


@pytest.mark.parametrize("key", ["a.b", "team.owner", "a1_.b", "a._x", "a.0", "a.b.c", "a.b..", "a.b."])
def test_a_tag_key_is_a_namespace_a_dot_and_a_field(key: str) -> None:
    assert check_tag_key(key) == key


@pytest.mark.parametrize(
    "key",
    ["", "a", "a.", ".a", "A.b", "a.B", "1a.b", "_a.b", "a..b", "a-b.c", "a.b\n", "\u00e9.b", "a.b c", None],
)
def test_a_bad_tag_key_is_quoted(key: object) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_tag_key(key)
    assert ascii(key) in caught.value.detail


def test_tags_at_create_are_kept_as_given() -> None:
    tags = {"no dot": "x", "": "", "A.b": "\u00e9" * 1000}
    assert check_tags(tags) == tags
    assert check_tags(tags) is not tags
    assert check_tags(None) == {}


@pytest.mark.parametrize("tags", [{"a": 1}, {1: "a"}, {"a": None}, {"a": "\0"}, {"\ud800": "a"}, ["a"], "a"])
def test_tags_are_a_map_of_storable_text(tags: object) -> None:
    with pytest.raises(InvalidInput):
        check_tags(tags)  # type: ignore[arg-type]  # the point of the test


@pytest.mark.parametrize(
    ("value", "suffix"),
    [
        ("gpu", "not_array"),
        ({"gpu": 1}, "not_array"),
        (5, "not_array"),
        (["gpu", 5], "non_string_token"),
        ([None], "non_string_token"),
        ([""], "empty_token"),
        (["a,b"], "comma_in_token"),
        (["a b"], "control_or_whitespace"),
        (["a\x00"], "control_or_whitespace"),
        (["a\x7f"], "control_or_whitespace"),
        (["a\x85"], "control_or_whitespace"),
        (["a\u3000b"], "control_or_whitespace"),
        (["\ud800"], "control_or_whitespace"),
        ([str(n) for n in range(257)], "too_many_tokens"),
        (["x" * 4097], "too_many_bytes"),
        (["x" * 2048, "y" * 2048], "too_many_bytes"),
    ],
)
def test_a_bad_capability_list_says_which_side_and_why(value: object, suffix: str) -> None:
    for side, check in (("required", required_capabilities), ("worker", worker_capabilities)):
        with pytest.raises(ValidationFailed) as caught:
            check(value)
        assert caught.value.kind == "invalid_capabilities"
        assert caught.value.detail == f"{side}:{suffix}"


def test_both_capability_limits_are_inclusive_and_count_after_deduplication() -> None:
    assert len(required_capabilities([str(n) for n in range(256)] * 2)) == 256
    assert required_capabilities(["x" * 4096] * 3) == ("x" * 4096,)
    assert len(required_capabilities(["x" * 2048, "y" * 2047])) == 2


def test_absent_capabilities_are_none_at_all() -> None:
    assert required_capabilities(None) == required_capabilities([]) == ()


@given(
    st.sets(
        st.text(
            st.characters(codec="utf-8", exclude_categories=["Z", "C"], exclude_characters=","),
            min_size=1,
            max_size=8,
        ),
        max_size=20,
    )
)
def test_capabilities_come_back_sorted_by_their_bytes(tokens: set[str]) -> None:
    result = required_capabilities(tokens)
    assert list(result) == sorted(tokens, key=str.encode)
    assert worker_capabilities([*result, *result]) == result


@pytest.mark.parametrize(
    ("tokens", "value"),
    [((), "4fd0bfc1"), (("gpu",), "2fc2accd"), (("gpu", "cuda"), "c952a6c4"), (("cuda", "gpu"), "c952a6c4")],
)
def test_the_capability_hash_has_its_check_values(tokens: tuple[str, ...], value: str) -> None:
    assert capability_hash(tokens) == value
