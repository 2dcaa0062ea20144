"""The scripts' environment: made once, made again when what it depends on changes, refused with the remedy."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[3]
BASH = shutil.which("bash") or "/bin/bash"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A project of our scripts whose interpreter only notes what it is asked to do."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(PROJECT / "scripts" / "_env.sh", tmp_path / "scripts")
    (tmp_path / "pyproject.toml").write_text("one")
    (tmp_path / "constraints.txt").write_text("two")
    bin_ = tmp_path / ".venv" / "bin"
    bin_.mkdir(parents=True)
    (bin_ / "python").write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/calls\n')
    (bin_ / "python").chmod(0o755)
    return tmp_path


def env(checkout: Path, script: str, **extra: str) -> subprocess.CompletedProcess[str]:
    command = f'set -euo pipefail; . "{checkout}/scripts/_env.sh"; {script}'
    environment = {"PATH": os.environ["PATH"], "HOME": str(checkout), **extra}
    return subprocess.run([BASH, "-c", command], capture_output=True, text=True, timeout=60, check=False, env=environment)


def installs(checkout: Path) -> list[str]:
    return [line for line in (checkout / "calls").read_text().splitlines() if "pip install" in line]


def test_installs_with_the_constraints_once(checkout: Path) -> None:
    for _ in range(2):
        result = env(checkout, "ftckpt_env dev")
        assert result.returncode == 0, result.stderr
    (line,) = installs(checkout)
    assert "--constraint constraints.txt" in line
    assert "--editable .[dev]" in line


def test_a_wider_environment_serves_a_narrower_extra_but_not_the_reverse(checkout: Path) -> None:
    env(checkout, "ftckpt_env dev")
    env(checkout, "ftckpt_env demo dev")
    assert len(installs(checkout)) == 1
    env(checkout, f"rm {checkout}/.venv/.ftckpt-dev; ftckpt_env demo dev; ftckpt_env dev")
    assert len(installs(checkout)) == 3


@pytest.mark.parametrize("file", ["pyproject.toml", "constraints.txt"])
def test_installs_again_when_what_it_depends_on_changes(checkout: Path, file: str) -> None:
    env(checkout, "ftckpt_env dev")
    (checkout / file).write_text("changed")
    env(checkout, "ftckpt_env dev")
    assert len(installs(checkout)) == 2


def test_a_failed_installation_leaves_no_stamp_and_fails(checkout: Path) -> None:
    python = checkout / ".venv" / "bin" / "python"
    python.write_text('#!/bin/sh\ncase "$*" in *"pip install"*) exit 7;; esac\n')
    assert env(checkout, "ftckpt_env dev").returncode == 7
    assert not (checkout / ".venv" / ".ftckpt-dev").exists()


def test_says_what_to_install_where_etcd_is_missing_and_we_are_nobody(checkout: Path) -> None:
    tools = checkout / "tools"
    tools.mkdir()
    for tool in ("dirname", "bash"):
        (tools / tool).symlink_to(shutil.which(tool) or "")
    result = env(checkout, "is_root() { false; }; etcd_server", PATH=str(tools))
    assert result.returncode == 1
    assert "apt-get install etcd-server" in result.stderr


def test_says_so_where_no_python_is_new_enough(checkout: Path) -> None:
    old = checkout / "old"
    old.mkdir()
    (old / "dirname").symlink_to(shutil.which("dirname") or "")
    for name in ("python3", "python3.11", "python3.12", "python3.13", "python3.14"):
        (old / name).write_text("#!/bin/sh\nexit 1\n")
        (old / name).chmod(0o755)
    result = env(checkout, "find_python", PATH=str(old))
    assert result.returncode == 1
    assert "Python 3.11 or newer" in result.stderr


def test_ci_runs_the_whole_test_command() -> None:
    assert (PROJECT / ".ci" / "run").read_text().splitlines()[-1] == "exec ./scripts/test"
