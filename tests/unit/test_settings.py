"""Settings: their defaults, their environment names, and what an environment may say."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from flowfabric.errors import InvalidInput
from flowfabric.settings import ENVIRONMENT, Settings, load
from tests.each import each


def test_without_an_environment_everything_has_its_default() -> None:
    assert load({}) == Settings()
    assert Settings() == Settings(dsn=None, data_dir=Path(".flowfabric"), pg_bin=None, lanes=("default",))


def test_every_setting_has_an_environment_name_that_begins_with_ours() -> None:
    assert set(ENVIRONMENT) == {field.name for field in dataclasses.fields(Settings)}
    assert all(name == f"FLOWFABRIC_{field.upper()}" for field, name in ENVIRONMENT.items())


def test_every_setting_is_read_from_its_name_alone() -> None:
    given = {
        "FLOWFABRIC_DSN": "postgresql://somewhere/db",
        "FLOWFABRIC_DATA_DIR": "/data",
        "FLOWFABRIC_PG_BIN": "/pg/bin",
        "FLOWFABRIC_LANES": "a,b",
        "FLOWFABRIC_TEST_DSN": "postgresql://tests/db",
        "FLOWFABRIC_PUBLIC_URL": "https://flows.example/api/",
        "DSN": "postgresql://elsewhere/db",
        "FF_LANES": "c",
    }
    expected = Settings(
        dsn="postgresql://somewhere/db",
        data_dir=Path("/data"),
        pg_bin=Path("/pg/bin"),
        lanes=("a", "b"),
        test_dsn="postgresql://tests/db",
        public_url="https://flows.example/api",
    )
    assert load(given) == expected
    for name in ENVIRONMENT.values():
        assert load({name: given[name]}) != Settings()


@each(
    "text",
    [
        "flows.example",
        "ftp://flows.example",
        "https://",
        "https://a:secret@flows.example",
        "https://x/?a",
        "http://[x",
        "/w",
    ],
)
def test_the_public_address_is_an_address(text: str) -> None:
    with pytest.raises(InvalidInput, match="FLOWFABRIC_PUBLIC_URL") as refused:
        load({"FLOWFABRIC_PUBLIC_URL": text})
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("empty", ["", " ", "\t\n"])
def test_an_empty_variable_counts_as_unset(empty: str) -> None:
    assert load(dict.fromkeys(ENVIRONMENT.values(), empty)) == Settings()


@pytest.mark.parametrize(
    ("text", "lanes"),
    [
        ("a", ("a",)),
        (" a , b ,", ("a", "b")),
        (",,a,", ("a",)),
        ("a b,c", ("a b", "c")),
    ],
)
def test_lanes_are_separated_by_commas(text: str, lanes: tuple[str, ...]) -> None:
    assert load({"FLOWFABRIC_LANES": text}).lanes == lanes


def test_a_list_of_no_lanes_is_refused_by_its_name() -> None:
    with pytest.raises(InvalidInput) as refused:
        load({"FLOWFABRIC_LANES": " , ,"})
    assert refused.value.field == "FLOWFABRIC_LANES"


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT.values():
        monkeypatch.delenv(name, raising=False)
    assert load() == Settings()
    monkeypatch.setenv("FLOWFABRIC_DSN", " postgresql://h/d ")
    assert load().dsn == "postgresql://h/d"


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Settings().dsn = "x"  # type: ignore[misc]
