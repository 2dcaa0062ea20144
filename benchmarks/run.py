"""Runs benchmarks and prints our times beside the machine's limits and other checkpointers', as ratios; measures nothing itself.

Every party (ours, a limit, a peer) is a process of its own. They take turns, round by round, so that all meet the same machine;
what is printed is the median of the rounds. A party that cannot run leaves its cells empty and says why on stderr. SIGTERM and SIGINT end a run
with what was measured so far; its files are removed and its processes ended then too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ending import Ended, adopt, folder, on_signals
from rows import BENCHES, Row
from turns import Worker

ROOT = Path(__file__).resolve().parents[1]

Seconds = dict[str, float]  # "party.key" -> median seconds


def measure(parties: Sequence[str], *, mb: int, rounds: int, folder: Path, console: Console) -> tuple[Seconds, str]:
    """Let the parties take turns and return the median of each of their figures, and what ended them early, if anything did.

    Args:
        mb: size of the state, in units of 10**6 bytes.
        rounds: turns of each party, after one that does not count where the party itself says so.
    """
    samples: dict[str, list[float]] = {}
    begun, now, ended = time.monotonic(), "", ""
    with contextlib.ExitStack() as stack:
        try:
            workers = [stack.enter_context(Worker(party, mb=mb, folder=folder / party)) for party in parties]
            for turn in range(rounds):
                for worker in workers:
                    now = f"round {turn + 1} of {rounds}, {worker.party}"
                    if console.is_terminal:
                        console.print(f"[dim]{now:<60}[/]", end="\r")
                    for key, value in worker.turn().items():
                        samples.setdefault(f"{worker.party}.{key}", []).append(value)
                if not console.is_terminal:
                    print(f"bench: round {turn + 1} of {rounds} done, {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
        except Ended as e:
            ended = f"ended by {e} in {now or 'the beginning'}"
            stack.pop_all()  # nobody waits for them: whoever is left is killed with the folder
    return {key: statistics.median(values) for key, values in samples.items()}, ended


def figures(row: Row, seconds: Seconds) -> dict[str, object]:
    """A row as it goes into the JSON file: seconds, and ratios of ours to each."""

    def best(keys: tuple[str, ...]) -> float | None:
        found = [seconds[key] for key in keys if key in seconds]
        return min(found) if found else None

    def ratio(other: float | None) -> float | None:
        return ours / other if ours is not None and other else None

    ours = best((row.ours,))
    limit = row.limit if isinstance(row.limit, float) else best(row.limit)
    peers = {}
    for peer in row.peers:
        other = best((peer.key,))
        peers[peer.name] = {"seconds": other, "ratio": ratio(other), "target": peer.target}
    return {
        "name": row.name,
        "ours": ours,
        "limit": limit,
        "ratio": ratio(limit),
        "target": row.target,
        "what": row.what,
        "limit_is": row.limit_is,
        "peers": peers,
    }


def show(console: Console, title: str, lines: list[dict[str, object]]) -> None:
    """One table: a line per row, and one below it per peer."""
    console.print(f"[bold]{title}[/]")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("what", "seconds", "beside", "seconds", "ratio", "target"):
        table.add_column(name, justify="right" if name in {"seconds", "ratio", "target"} else "left")
    for line in lines:
        peers = line["peers"]
        table.add_row(
            str(line["what"]), _s(line["ours"]), str(line["limit_is"]), _s(line["limit"]), *_judged(line["ratio"], line["target"])
        )
        for name, peer in peers.items():  # type: ignore[attr-defined]
            table.add_row("", "", f"[dim]{name}[/]", _s(peer["seconds"]), *_judged(peer["ratio"], peer["target"]))
    console.print(table)
    console.print()


def _s(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "-"


def _judged(ratio: object, target: object) -> tuple[str, str]:
    shown = f"{ratio:.2f}" if isinstance(ratio, float) else "-"
    if not isinstance(target, float):
        return shown, ""
    colour = "" if not isinstance(ratio, float) else "green" if ratio <= target else "red"
    return (f"[{colour}]{shown}[/]" if colour else shown), f"<= {target:.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of: {', '.join(BENCHES)} (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--mb", type=int, default=200, help="size of the state in 10^6 bytes (default 200)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each party; medians are shown (default 5)")
    parser.add_argument(
        "--dir", type=Path, default=ROOT / "artifacts", help="where files are written (and removed): the disk that is measured"
    )
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in BENCHES]:
        parser.error(f"no benchmark {', '.join(unknown)}; there are: {', '.join(BENCHES)}")
    if args.mb < 1 or args.rounds < 1:
        parser.error("--mb and --rounds must be at least 1")

    console, out = Console(stderr=True), Console()
    if not out.is_terminal:
        out.width = 120
    args.dir.mkdir(parents=True, exist_ok=True)
    on_signals()
    adopt()
    written: list[dict[str, object]] = []
    ended = ""
    for name in args.names or BENCHES:
        bench = BENCHES[name]
        with folder(args.dir, name) as place:
            seconds, ended = measure(bench.parties, mb=args.mb, rounds=args.rounds, folder=place, console=console)
        lines = [figures(row, seconds) for row in bench.rows]
        show(out, f"{name}: {bench.title} ({args.mb} MB, medians of {args.rounds}{f'; {ended}' if ended else ''})", lines)
        written += lines
        if ended:
            print(f"bench: {ended}; what is shown was measured before", file=sys.stderr)
            break
    if args.json:
        args.json.write_text(json.dumps(written, indent=1) + "\n")
    return 1 if ended else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Ended as e:
        sys.exit(f"bench: ended by {e}")
