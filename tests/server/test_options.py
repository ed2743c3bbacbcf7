"""The options of a server: defaults, environment, command line, and what is refused under which name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowfabric import settings
from flowfabric.errors import InvalidInput
from flowfabric.server.options import Options, Rate, load_options


def test_without_anything_a_server_listens_on_this_machine_and_asks_for_keys() -> None:
    options = load_options({}, {})
    assert (options.host, options.port, options.processes, options.auth) == ("127.0.0.1", 8484, 1, "keys")
    assert options.is_loopback
    assert options.duties
    assert options.cors_origins == options.trusted_proxies == ()
    assert (options.large_body, options.medium_body, options.control_body) == (1 << 20, 256 << 10, 64 << 10)
    assert options.key_rate is options.address_rate is None
    assert options.link_rate == Rate(5, 30)
    assert options.url(1234) == "http://127.0.0.1:1234"


def test_every_option_has_a_variable_and_a_parser() -> None:
    assert all(name == f"FLOWFABRIC_{option.upper()}" for option, name in settings.SERVER_ENVIRONMENT.items())
    assert not set(settings.SERVER_ENVIRONMENT.values()) & set(settings.ENVIRONMENT.values())
    known = {"host", "port", *settings.SERVER} - {"listen"}
    assert set(Options.__struct_fields__) == known


def test_an_argument_wins_over_the_environment_and_an_empty_variable_counts_as_unset() -> None:
    env = {"FLOWFABRIC_LISTEN": "127.0.0.1:1", "FLOWFABRIC_GRACE": "5s", "FLOWFABRIC_DUTIES": " "}
    options = load_options({"listen": "[::1]:2", "duties": False, "processes": None}, env)
    assert (options.host, options.port, options.grace, options.duties) == ("::1", 2, 5.0, False)
    assert options.url() == "http://[::1]:2"


GOOD: list[tuple[str, str, Any]] = [
    ("processes", "4", 4),
    ("grace", "1m 30s", 90.0),
    ("grace", "0", 0.0),
    ("large_body", "2MiB", 2 << 20),
    ("large_body", "2048", 2048),
    ("key_rate", "100/s", Rate(100, 200)),
    ("key_rate", "0.5/s burst 3", Rate(0.5, 3)),
    ("link_rate", "off", None),
    ("cors_origins", "https://a.example, http://b.example:3000", ("https://a.example", "http://b.example:3000")),
    ("trusted_proxies", "10.0.0.0/8,::1", ("10.0.0.0/8", "::1")),
    ("log_json", "yes", True),
]


def test_options_are_read_from_text() -> None:
    for name, text, value in GOOD:
        options = load_options({}, {settings.SERVER_ENVIRONMENT[name]: text})
        assert getattr(options, name) == value, name


BAD = [
    ("listen", "8484"),
    ("listen", ":8484"),
    ("listen", "localhost:65536"),
    ("listen", "localhost:x"),
    ("processes", "0"),
    ("processes", "-1"),
    ("processes", "1.5"),
    ("auth", "basic"),
    ("duties", "perhaps"),
    ("grace", "soon"),
    ("grace", "2 days"),
    ("connections", "1"),
    ("large_body", "1"),
    ("large_body", "2GiB"),
    ("large_body", "1MB"),
    ("key_rate", "100"),
    ("key_rate", "0/s"),
    ("key_rate", "5/s burst 0"),
    ("cors_origins", "*"),
    ("cors_origins", "app.example"),
    ("cors_origins", "https://app.example/"),
    ("trusted_proxies", "proxy"),
    ("trusted_proxies", "10.0.0.1/8"),
    ("request_timeout", "0"),
    ("max_connections", "0"),
    ("log_level", "loud"),
    ("tls_certificate", "/no/such/file.pem"),
]


def test_a_wrong_option_is_refused_under_the_name_by_which_it_was_given() -> None:
    for name, text in BAD:
        for given, env, field in (
            ({name: text}, {}, f"--{name.replace('_', '-')}"),
            ({}, {settings.SERVER_ENVIRONMENT[name]: text}, settings.SERVER_ENVIRONMENT[name]),
        ):
            with pytest.raises(InvalidInput) as refused:
                load_options(given, env)
            assert refused.value.field == field, (name, text)
            assert refused.value.allowed, (name, text)


def test_a_certificate_needs_its_key(tmp_path: Path) -> None:
    file = tmp_path / "server.pem"
    file.write_text("-")
    for one, other in (("tls_certificate", "--tls-key"), ("tls_key", "--tls-certificate")):
        with pytest.raises(InvalidInput) as refused:
            load_options({one: str(file)}, {})
        assert refused.value.field == other


def test_without_keys_a_server_listens_on_loopback_only() -> None:
    for host in ("127.0.0.1", "127.9.9.9", "[::1]", "localhost"):
        assert load_options({"auth": "none", "listen": f"{host}:0"}, {}).auth == "none"
    for host in ("0.0.0.0", "[::]", "10.0.0.1", "server.example"):
        with pytest.raises(InvalidInput) as refused:
            load_options({"auth": "none", "listen": f"{host}:0"}, {})
        assert refused.value.field == "--auth none"


def test_the_address_of_the_owner_is_not_shown() -> None:
    options = load_options({"owner_dsn": "postgresql://owner:hunter2@db/app"}, {})
    assert "hunter2" not in repr(options)
