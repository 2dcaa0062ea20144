"""``./scripts/chaos``: seeded runs of faults against real jobs, judged afterwards. Exit 0 valid, 2 unknown, 1 invalid."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec

from chaos.checkers.judges import judge
from chaos.checkers.verdicts import STATUS, Verdict, overall
from chaos.evidence import Evidence, load, store
from chaos.nemeses.schedule import KINDS, possible, schedule
from chaos.runner import Runner, describe, folder_for
from chaos.workloads.jobs import PEERS, WORKLOADS, Plan
from chaos.workloads.network import have_network

QUIET = ("restart", "hung", "undo", "healthy", "calm", "goal", "stuck", "skipped", "rebuilt", "kill-before-point")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the same seed gives the same schedule of faults")
    parser.add_argument("--minutes", type=float, default=5.0, help="how long faults are done")
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="repeat for several, one after the other; default: torchft")
    parser.add_argument("--nemesis", action="append", default=[], metavar="NAME", help=f"only these: {', '.join(KINDS)}")
    parser.add_argument("--kills", type=int, default=0, help="end after so many faults, whatever the time")
    parser.add_argument("--overlap", type=float, default=0.25, help="share of faults that come at any moment, recovered or not")
    parser.add_argument("--log", choices=("sqlite", "etcd", "etcd3"), default="sqlite", help="etcd3: three members")
    parser.add_argument(
        "--rendezvous",
        choices=("c10d", "etcd", "etcd-v2", "etcd-v3"),
        help="of torchrun; default: etcd-v3 where the log is in etcd, else c10d. One process goes without torchrun only with c10d",
    )
    parser.add_argument("--no-network", action="store_true", help="no network namespaces, even where root allows them")
    parser.add_argument("--small-disk", action="store_true", help="root on a small file system of its own (needs root; default as root)")
    parser.add_argument("--no-small-disk", action="store_true", help="root in the artefacts' own file system, even as root")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds within which a job must recover")
    parser.add_argument("--slow", type=float, default=0.05, help="seconds of sleep in each step")
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--workers", type=int, default=0, help="DataLoader workers")
    parser.add_argument("--width", type=int, default=64, help="of the model; the state has about 12 * width^2 bytes")
    parser.add_argument("--artefacts", type=Path, default=Path("artifacts/chaos"))
    parser.add_argument("--judge", type=Path, help="judge the artefacts of an earlier run again, and run nothing")
    parser.add_argument("--plan", action="store_true", help="print the first faults of the schedule, and run nothing")
    return parser.parse_args(argv)


def needs_of(args: argparse.Namespace, workload: str) -> list[str]:
    """What a job of this kind has that faults can be done to."""
    has = {
        "group": workload != "solo" or args.rendezvous != "c10d",
        "peers": workload in PEERS,
        "etcd": args.log != "sqlite",
        "etcd3": args.log == "etcd3",
        "network": args.network,
        "proxies": args.log != "sqlite" and not args.network,
        "small-disk": args.small_disk,
    }
    return [name for name, there in has.items() if there]


def one(args: argparse.Namespace, workload: str) -> tuple[Evidence, Path]:
    """Run one workload."""
    folder = folder_for(args.artefacts.resolve(), f"{workload}-{args.log}-{args.seed}")
    plan = Plan(
        workload=workload,
        folder=folder,
        log=args.log,
        rendezvous=args.rendezvous,
        network=args.network,
        save_every=args.save_every,
        slow=args.slow,
        workers=args.workers,
        width=args.width,
    )
    kinds = possible(needs_of(args, workload), args.nemesis)
    seconds = 1e9 if args.kills and args.minutes == 5.0 else args.minutes * 60
    began = time.time()

    def tell(text: str) -> None:
        print(f"[{time.time() - began:7.1f}] {text}", flush=True)

    tell(f"{workload} on {args.log}, seed {args.seed}: {', '.join(kinds)}; artefacts in {folder}")
    runner = Runner(
        plan, args.seed, schedule(args.seed, kinds, overlap=args.overlap), seconds=seconds, most=args.kills, patience=args.patience,
        small_disk=args.small_disk, tell=tell,
    )  # fmt: skip
    try:
        evidence = runner.run()
    finally:
        runner.close()
    store(folder, evidence)
    return evidence, folder


def report(e: Evidence, verdicts: list[Verdict]) -> str:
    """What happened, and what the checkers say."""
    faults = Counter(h.kind for h in e.happened if h.kind not in QUIET)
    times = sorted(h.seconds for h in e.happened if h.kind == "healthy")
    generations = sum(x.kind == "generation" for x in e.entries)
    lines = [
        f"{e.run.workload} on {e.run.log}, seed {e.run.seed}, {e.run.ended - e.run.began:.0f} s",
        f"faults: {sum(faults.values())}: {', '.join(f'{n} {k}' for k, n in sorted(faults.items()))}",
        f"generations committed: {generations}; openings: {len(e.entries) - generations}; highest step: {max((x.step for x in e.lines), default=0)}",
        f"restarts: {sum(h.kind == 'restart' for h in e.happened)}; heals: {sum(x.healed for x in e.lines)}; resumes: {sum(x.kind == 'resumed' for x in e.lines)}",
    ]
    if hung := [h for h in e.happened if h.kind == "hung"]:
        lines.append(f"ended because silent: {', '.join(f'{h.units[0]} (after: {h.text})' for h in hung)}")
    if times:
        lines.append(f"recoveries: {len(times)}; seconds: median {times[len(times) // 2]:.1f}, longest {times[-1]:.1f}")
    for v in verdicts:
        lines.append(f"  {v.word:8} {v.checker} ({v.seen})")
        lines += [f"           {p}" for p in v.problems]
    return "\n".join([*lines, f"verdict: {overall(verdicts)}"])


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    args.network = not args.no_network and have_network()
    args.rendezvous = args.rendezvous or ("c10d" if args.log == "sqlite" else "etcd-v3")
    args.small_disk = args.small_disk or (os.geteuid() == 0 and not args.no_small_disk)
    workloads = args.workload or ["torchft"]
    if args.plan:
        for workload in workloads:
            kinds = possible(needs_of(args, workload), args.nemesis)
            print("\n".join(describe(p) for p in itertools.islice(schedule(args.seed, kinds, overlap=args.overlap), args.kills or 20)))
        return 0
    worst: list[Verdict] = []
    for workload in workloads if args.judge is None else ["judge"]:
        evidence, folder = (load(args.judge), args.judge) if args.judge is not None else one(args, workload)
        verdicts = judge(evidence)
        text = report(evidence, verdicts)
        (folder / "report.txt").write_text(text + "\n")
        (folder / "verdict.json").write_bytes(msgspec.json.format(msgspec.json.encode(verdicts), indent=1))
        print(text, flush=True)
        worst += verdicts
    return STATUS[overall(worst)]


if __name__ == "__main__":
    sys.exit(main())
