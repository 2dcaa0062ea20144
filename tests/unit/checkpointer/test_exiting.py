"""Uncaught errors of ours choose the exit status; all others keep Python's."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
from ftckpt import errors
from ftckpt.trainer import exiting
exiting.install(); exiting.install()
print("before")
raise {error}
"""


@pytest.mark.covers("F56", "F79", "I14")
@pytest.mark.parametrize(("error", "status"), [("errors.Diverged('x')", 8), ("errors.HealFailed('x')", 9), ("ValueError('x')", 1)])
def test_an_uncaught_error_ends_the_process_with_its_own_status(error: str, status: int) -> None:
    run = subprocess.run([sys.executable, "-c", CODE.format(error=error)], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == status
    assert "before" in run.stdout
    assert run.stderr.count("Traceback") == 1
