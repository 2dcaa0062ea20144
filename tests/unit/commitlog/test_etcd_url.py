"""What an etcd URL may say, and that a password in it or beside it is never shown."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ftckpt.commitlog.etcd_url import EtcdTarget, parse_url, split_endpoint
from ftckpt.errors import ConfigError


def test_a_url_names_endpoints_prefix_and_settings(tmp_path: Path) -> None:
    password = tmp_path / "pw"
    password.write_text("hush\nmore\n")
    target = parse_url(f"etcds://h1:1,h2,[::1]:3/team/a/?user=u&password_file={password}&timeout=2.5&ca=/ca&cert=/c&key=/k")
    assert target.endpoints == ("h1:1", "h2:2379", "[::1]:3")
    assert (target.prefix, target.secure, target.timeout) == ("/team/a", True, 2.5)
    assert (target.user, target.secret(), target.ca, target.cert, target.key) == ("u", "hush", "/ca", "/c", "/k")
    assert parse_url("etcd://h").prefix == ""


@pytest.mark.covers("I10")
def test_a_password_is_never_shown() -> None:
    target = parse_url("etcd://h?user=u", password="hush-hush")
    shown = f"{target!r} {target!s} {target.url} {target.__rich_repr__()}"
    assert target.secret() == "hush-hush"
    assert "hush" not in shown


@pytest.mark.covers("F78")
@pytest.mark.parametrize(
    "url",
    [
        "http://h:1",
        "h:1",
        "etcd://",
        "etcd://h:x",
        "etcd://h:0",
        "etcd://::1:2379",
        "etcd://u:p@h:1",
        "etcd://h?user=u",
        "etcd://h?password_file=x",
        "etcd://h?ca=/ca",
        "etcds://h?cert=/c",
        "etcd://h?timeout=0",
        "etcd://h?timeout=soon",
        "etcd://h?time=5",
        "etcd://h?timeout=5&timeout=6",
        "etcd://h/a#b",
    ],
)
def test_a_url_that_makes_no_sense_is_refused(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_url(url)
    assert "u:p" not in str(refused.value)


@pytest.mark.covers("F78")
def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        EtcdTarget(endpoints=("nowhere",), prefix="x", timeout=-1, cert="c", user="u")
    for part in ("host:port", "prefix", "timeout", "cert and key", "etcds", "user and password"):
        assert part in refused.value.what


def test_a_password_file_that_cannot_be_read_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="password file"):
        parse_url(f"etcd://h?user=u&password_file={tmp_path / 'none'}").secret()


def test_an_endpoint_is_split_at_its_last_colon() -> None:
    assert split_endpoint("[::1]:2379") == ("[::1]", 2379)
    assert split_endpoint("10.0.0.1:1") == ("10.0.0.1", 1)


@pytest.mark.parametrize("module", ["ftckpt.commitlog", "ftckpt.commitlog.sqlite", "ftckpt.commitlog.memory", "ftckpt.commitlog.etcd_url"])
def test_the_client_library_is_loaded_by_the_etcd_backend_only(module: str) -> None:
    code = f"import sys, {module}; sys.exit(any(m in sys.modules for m in ('grpc', 'etcd3', 'torch')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0


@pytest.mark.covers("I14", "F78")
@pytest.mark.parametrize("endpoint", ["h1:99999", "h1:abc", "h1:0", "h1:"])
def test_a_port_that_cannot_be_is_named(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="port from 1 to 65535") as error:
        parse_url(f"etcd://h0,{endpoint}")
    assert endpoint in error.value.what
    assert "at least one" not in error.value.what
