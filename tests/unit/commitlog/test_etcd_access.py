"""The etcd log with users and passwords, with tokens that the server forgets, and with TLS and client certificates."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from timing import timed

from ftckpt.commitlog.etcd import EtcdLog
from ftckpt.errors import ConfigError, LogUnreachable
from ftckpt.testing.etcd_server import EtcdServer, have_etcd
from ftckpt.testing.log_world import eventually, fill, generation

pytestmark = [pytest.mark.etcd, pytest.mark.skipif(not have_etcd(), reason="no etcd in PATH")]
PASSWORD = "hush-hush-7"


@pytest.fixture(scope="module")
def guarded() -> Iterator[EtcdServer]:
    """An etcd where only user ``job`` may use keys below ``/team/``."""
    with EtcdServer(fsync=False) as server:
        for path, body in (
            ("/v3/auth/user/add", {"name": "root", "password": "root"}),
            ("/v3/auth/role/add", {"name": "root"}),
            ("/v3/auth/user/grant", {"user": "root", "role": "root"}),
            ("/v3/auth/user/add", {"name": "job", "password": PASSWORD}),
            ("/v3/auth/role/add", {"name": "team"}),
            ("/v3/auth/role/grant", {"name": "team", "perm": {"permType": "READWRITE", "key": "L3RlYW0v", "range_end": "L3RlYW0w"}}),
            ("/v3/auth/user/grant", {"user": "job", "role": "team"}),
            ("/v3/auth/enable", {}),
        ):
            server.post(path, body)
        yield server


@pytest.fixture
def password_file(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.write_text(PASSWORD + "\n")
    return path


def test_a_user_with_a_password_file_works_below_its_prefix(guarded: EtcdServer, password_file: Path) -> None:
    log = EtcdLog.from_url(f"{guarded.url}/team?user=job&password_file={password_file}", "j")
    seen: list[int] = []
    log.watch(lambda entry: seen.append(entry.index))
    fill(log, 3)
    eventually("the watch is let in as well", lambda: seen[-1:] == [2])
    log.close()


@pytest.mark.covers("I10")
@pytest.mark.parametrize(
    ("path", "user", "password"),
    [("/team", "job", "wrong"), ("/team", "nobody", "wrong"), ("/other", "job", PASSWORD), ("/team", None, None)],
)
def test_who_is_not_let_in_is_told_so_at_once_without_the_password(
    guarded: EtcdServer, path: str, user: str | None, password: str | None
) -> None:
    log = EtcdLog.from_url(f"{guarded.url}{path}" + (f"?user={user}" if user else ""), "j", password=password)
    with pytest.raises(LogUnreachable, match="refused") as error:
        log.append(generation(1), expect_tail=-1)
    chain = f"{error.value} {error.value!r} {error.value.__cause__!r}"
    assert PASSWORD not in chain
    log.close()


@pytest.mark.covers("F65")
def test_a_token_that_the_server_has_forgotten_is_renewed(guarded: EtcdServer) -> None:
    log = EtcdLog.from_url(f"{guarded.url}/team?user=job", "tokens", password=PASSWORD)
    seen: list[int] = []
    log.watch(lambda entry: seen.append(entry.index))
    fill(log, 1)
    guarded.kill()
    guarded.start()  # simple tokens live in the server's memory
    eventually("reads go on", lambda: timed(log.tail)[0] is None, 15)
    assert log.append(generation(2), expect_tail=0).index == 1
    eventually("so does the watch", lambda: seen[-1:] == [1], 15)
    log.close()


def openssl(directory: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True, timeout=30)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    there = tmp_path_factory.mktemp("tls")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for authority in ("ca", "stranger"):
        openssl(
            there,
            "req",
            "-x509",
            *key,
            "-keyout",
            f"{authority}.key",
            "-out",
            f"{authority}.pem",
            "-days",
            "2",
            "-subj",
            f"/CN={authority}",
        )
    (there / "ext").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\nextendedKeyUsage=serverAuth,clientAuth\n")
    for name, authority in (("server", "ca"), ("client", "ca"), ("foreign", "stranger")):
        openssl(there, "req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signed = ("-CA", f"{authority}.pem", "-CAkey", f"{authority}.key", "-CAcreateserial")
        openssl(there, "x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.pem", "-days", "2", "-extfile", "ext")
    return there


@pytest.fixture(scope="module")
def secure(certificates: Path) -> Iterator[EtcdServer]:
    tls = tuple(str(certificates / name) for name in ("server.pem", "server.key", "ca.pem"))
    with EtcdServer(tls=tls, fsync=False) as server:
        yield server


def tls_log(server: EtcdServer, there: Path, ca: str, client: str | None) -> EtcdLog:
    pair = f"&cert={there / f'{client}.pem'}&key={there / f'{client}.key'}" if client else ""
    return EtcdLog.from_url(f"{server.url}?timeout=1&ca={there / f'{ca}.pem'}{pair}", "j")


def test_tls_with_a_client_certificate_works(secure: EtcdServer, certificates: Path) -> None:
    log = tls_log(secure, certificates, "ca", "client")
    fill(log, 2)
    assert log.tail() == log.entry(1)
    log.close()


@pytest.mark.covers("I10")
@pytest.mark.parametrize(("ca", "client"), [("stranger", "client"), ("ca", "foreign"), ("ca", None)])
def test_a_stranger_on_either_side_is_refused(secure: EtcdServer, certificates: Path, ca: str, client: str | None) -> None:
    log = tls_log(secure, certificates, ca, client)
    kind, seconds = timed(log.tail)
    assert (kind, seconds < 2) == (LogUnreachable, True)
    log.close()


def test_a_certificate_that_is_not_there_is_a_config_error(secure: EtcdServer, certificates: Path) -> None:
    with pytest.raises(ConfigError, match="TLS files"):
        tls_log(secure, certificates, "nowhere", "client").tail()
