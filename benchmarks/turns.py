"""A party's process as the runner sees it: started once, asked for one round at a time, with a deadline; and its other end.

The parent writes one line per round; the child answers with one JSON object of seconds. Whatever the child prints
goes to a file, and its end is shown when the child fails.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

TURN_SECONDS = 180.0
ENDS = 30.0  # within which a party whose input is closed has ended
SAID = 25  # last lines of a failed party's output that are shown

Party = Callable[[int, Path], Iterator[dict[str, float]]]


class Worker:
    """One party's process. ``turn`` returns its figures, or nothing once it has failed (what it said last goes to stderr)."""

    def __init__(self, party: str, *, mb: int, folder: Path) -> None:
        self.party, self._mb, self._folder = party, mb, folder
        self._output = folder / "output.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True)
        command = [sys.executable, __file__, self.party, str(self._mb), str(self._folder)]
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, start_new_session=True)
        return self

    def turn(self) -> dict[str, float]:
        """Have one round done and return its seconds by key."""
        if self._process is None or self._process.stdin is None or self._process.stdout is None:
            return {}
        try:
            self._process.stdin.write(b"go\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return self._give_up("has ended")
        if not select.select([self._process.stdout], [], [], TURN_SECONDS)[0]:
            self._note_stacks()
            return self._give_up(f"did not answer within {TURN_SECONDS:.0f} s", kill=True)
        line = self._process.stdout.readline()
        return json.loads(line) if line else self._give_up("has ended")

    def _note_stacks(self) -> None:
        """Have it write where its threads are."""
        if self._process is not None:
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(0.5)

    def _give_up(self, why: str, *, kill: bool = False) -> dict[str, float]:
        (self.kill if kill else self.__exit__)()
        last = self._output.read_text(errors="replace").splitlines()[-SAID:]
        print("\n".join((f"bench: {self.party} {why}; its cells stay empty. It said at the end:", *last)), file=sys.stderr)
        return {}

    def kill(self) -> None:
        """End it at once, with what it started in its session."""
        process, self._process = self._process, None
        if process is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=ENDS)

    def __exit__(self, *_: object) -> None:
        process = self._process
        if process is None or process.stdin is None:
            return
        with contextlib.suppress(BrokenPipeError):  # it has ended by itself
            process.stdin.close()
        try:
            process.wait(timeout=ENDS)
        except subprocess.TimeoutExpired:
            print(f"bench: {self.party} had not ended {ENDS:.0f} s after its last round, and was killed", file=sys.stderr)
            self.kill()
        self._process = None


def _serve(party: Party, mb: int, folder: Path) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    rounds = party(mb, folder)
    try:
        for _ in sys.stdin:
            answers.write(json.dumps(next(rounds)) + "\n")
    finally:
        rounds.close()  # type: ignore[attr-defined]


if __name__ == "__main__":
    name, mb, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    module, _, function = name.partition(".")
    try:
        _serve(getattr(importlib.import_module(module), function), mb, folder)
    except Exception:
        traceback.print_exc()
        sys.exit(1)
