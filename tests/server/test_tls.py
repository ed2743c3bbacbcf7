"""HTTPS: served with a certificate and its key, and nothing but HTTPS then."""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from flowfabric.errors import InvalidInput
from flowfabric.server.options import load_options
from flowfabric.server.process import check_tls
from tests.server.following import PATIENCE
from tests.server.running import running


def certificate(folder: Path, name: str) -> dict[str, str]:
    """A certificate of this machine that it signed itself, and its key; returns the options that name them."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = {"tls_certificate": folder / f"{name}.pem", "tls_key": folder / f"{name}.key"}
    paths["tls_certificate"].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    paths["tls_key"].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return {option: str(path) for option, path in paths.items()}


async def test_a_server_with_a_certificate_speaks_https_and_nothing_else(database: str, tmp_path: Path) -> None:
    ours, other = certificate(tmp_path, "ours"), certificate(tmp_path, "other")
    async with running(database, **ours) as url:
        assert url.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=ours["tls_certificate"])
        async with httpx.AsyncClient(base_url=url, verify=trusting, timeout=PATIENCE) as client:
            made = await client.post("/v1/executions", json={"execution_kind": "work"})
            assert made.status_code == 201, made.text
            assert "max-age" in made.headers["strict-transport-security"]
            found = await client.get(made.headers["location"])
            assert found.json()["execution_id"] == made.json()["execution_id"]
            async with client.stream("GET", "/v1/events") as stream:
                assert (stream.status_code, stream.headers["content-type"]) == (200, "text/event-stream")
                assert await anext(stream.aiter_bytes())
        # Who trusts another certificate does not connect.
        doubting = ssl.create_default_context(cafile=other["tls_certificate"])
        async with httpx.AsyncClient(base_url=url, verify=doubting, timeout=PATIENCE) as client:
            with pytest.raises(httpx.ConnectError, match=r"(?i)certificate"):
                await client.get("/livez")
        # A plain request gets no HTTP.
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
        writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(PATIENCE):
            try:
                got = await reader.read()
            except ConnectionError:
                got = b""
        assert b"HTTP" not in got
        writer.close()


def test_a_key_of_another_certificate_is_refused_before_anything_starts(tmp_path: Path) -> None:
    ours, other = certificate(tmp_path, "ours"), certificate(tmp_path, "other")
    check_tls(load_options(ours, {}))
    with pytest.raises(InvalidInput) as refused:
        check_tls(load_options({**ours, "tls_key": other["tls_key"]}, {}))
    assert refused.value.field == "--tls-certificate"
