"""The same over TLS, with verification: the right authority is trusted, no other is, and plain requests get nothing."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import JOB, SECRET, document, pattern

from ftckpt.errors import PeerError
from ftckpt.transfer import Patience, SnapshotServer, fetch
from unit.links import certificate_in

SIZE = 3 << 20


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificate_in(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def server(certificate: Path) -> Iterator[SnapshotServer]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate / "cert", certificate / "key")
    with SnapshotServer("127.0.0.1", 0, SECRET, JOB, tls=context) as s:
        s.publish("snap", document(SIZE), memoryview(pattern(SIZE, 1)), lambda: None)
        yield s


def take(url: str, tls: ssl.SSLContext | None) -> memoryview:
    patience = Patience(stall=3, find=8)
    return fetch([url], 5, JOB, SECRET, lambda d: memoryview(bytearray(SIZE)), tls=tls, patience=patience).image


def test_state_is_taken_over_tls(server: SnapshotServer, certificate: Path) -> None:
    assert server.url.startswith("https://")
    assert take(server.url, ssl.create_default_context(cafile=str(certificate / "cert"))) == pattern(SIZE, 1)


def test_unknown_authority_is_not_trusted(server: SnapshotServer) -> None:
    with pytest.raises(PeerError, match="certificate verify failed"):
        take(server.url, None)


def test_plain_request_gets_nothing(server: SnapshotServer) -> None:
    with pytest.raises(PeerError):
        take(server.url.replace("https", "http"), None)
