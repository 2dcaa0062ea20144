"""Runs the test job in processes of its own, with a root and a runtime folder of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ftckpt.link import launch
from ftckpt.wiring import open_log

SCRIPT = Path(__file__).with_name("job_script.py")


class Run:
    """One finished run of the job: its lines, exit status and standard error."""

    def __init__(self, status: int, lines: list[dict[str, Any]], errors: str) -> None:
        self.status, self.lines, self.errors = status, lines, errors

    def of(self, event: str) -> list[dict[str, Any]]:
        return [x for x in self.lines if x["event"] == event]


class Jobs:
    """Starts runs of one job."""

    def __init__(self, folder: Path) -> None:
        self.root, self.runtime = folder / "root", folder / "run"
        self.root.mkdir()

    def argv(self, *options: object) -> list[str]:
        return [sys.executable, str(SCRIPT), "--root", str(self.root), *map(str, options)]

    def env(self, **more: str) -> dict[str, str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("FTCKPT_")}
        return {**clean, "FTCKPT_RUNTIME_DIR": str(self.runtime), "FTCKPT_DEADLINES_LINGER_S": "2", **more}

    def start(self, *options: object, python: tuple[str, ...] = (), **env: str) -> subprocess.Popen[str]:
        argv = self.argv(*options)
        argv[1:1] = python
        return subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.env(**env),
            start_new_session=True,
        )

    def run(self, *options: object, timeout: float = 60, python: tuple[str, ...] = (), **env: str) -> Run:
        process = self.start(*options, python=python, **env)
        try:
            out, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, errors = process.communicate()
            raise AssertionError(f"the job did not end within {timeout} s:\n{out[-2000:]}\n{errors[-4000:]}") from None
        return Run(process.returncode, [json.loads(x) for x in out.splitlines() if x.startswith("{")], errors)

    def steps(self, job: str = "job") -> list[int]:
        """Steps of the committed generations."""
        log = open_log(None, job=job, root_url=str(self.root))
        try:
            return [e.step for e in log.entries() if e.kind == "generation"]
        finally:
            log.close()

    def until_committed(self, step: int, timeout: float = 20) -> None:
        end = time.monotonic() + timeout
        while step not in self.steps():
            assert time.monotonic() < end, f"step {step} was not committed within {timeout} s; the log has {self.steps()}"
            time.sleep(0.05)

    def agents(self) -> list[int]:
        return list(launch.living(self.runtime).values()) if self.runtime.exists() else []
