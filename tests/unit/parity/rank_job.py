"""Two ranks of one group with a sharded model and states of their own; run under torchrun by test_ranks. What a rank finds is in a file."""

from __future__ import annotations

import json
import os
import random
import sys
import warnings
from datetime import timedelta
from pathlib import Path

warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor.debug import CommDebugMode  # noqa: E402

from ftckpt import Checkpointer, Never  # noqa: E402
from ftckpt.errors import FtckptError  # noqa: E402

OPTIONS: dict[str, dict[str, object]] = {
    "three-lenient": {"strict": {"own": "lenient", "stream": "lenient"}},
    "three-without": {"exclude": ["own"], "strict": {"stream": "lenient"}},
}


def sequence() -> int:
    """How many collectives the process group has made."""
    return int(dist.distributed_c10d._get_default_group()._get_sequence_number_for_group())


def refused_save(ckpt: Checkpointer, fails: list[bool], rank: int, said: dict[str, object]) -> None:
    """Three saves, of which rank 1 cannot take part in the second."""
    told = []
    for failing in (False, True, False):
        fails[0] = failing and rank == 1
        ckpt.step()
        try:
            entry = ckpt.save().wait(60.0)
            told.append(f"committed {entry.step}" if entry else "dropped")
        except Exception as e:
            told.append(f"{type(e).__name__}: {e}")
    said["saves"] = told


def main(root: Path, verb: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(7, 40), nn.ReLU(), nn.Linear(40, 3))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    stream = random.Random(100 + rank)
    own = {"rank": rank, "seen": torch.arange(3.0) * (rank + 1)} if verb == "save" else {"rank": -1}
    said: dict[str, object] = {"rank": rank}

    def tell(what: dict[str, object]) -> None:
        root.with_name(f"{verb}-{rank}.json").write_text(json.dumps(what))

    with Checkpointer.open(job="ranks", root=root, policy=Never()) as ckpt:
        ckpt.register(model=model, optimizer=optimizer)
        ckpt.add("own", own, scope="replica")
        ckpt.add("stream", stream, scope="replica")
        fails = [False]
        if verb == "refuse-start":
            ckpt.register(odd={"x": object() if rank else 1})
        if verb == "refuse-save":
            ckpt.register(odd=(lambda: 1 // (not fails[0]), print))
        if verb == "more":
            ckpt.add("another", {"n": 1}, scope="replica")
        try:
            with CommDebugMode() as counted:
                before = sequence()
                report = ckpt.resume(**OPTIONS.get(verb, {}))  # type: ignore[arg-type]
                said["step"], said["warnings"] = report.step, report.warnings
                said["states"] = {name: state.outcome for name, state in report.states.states.items()} if report.states else {}
                said["resuming"] = counted.get_total_counts() + sequence() - before
        except FtckptError as e:
            tell({**said, "error": type(e).__name__, "text": str(e)})
            os._exit(0)  # both ranks alike; nothing was begun
        if verb == "refuse-save":
            refused_save(ckpt, fails, rank, said)
        if verb == "save":
            saves = []
            for _ in range(3):
                model(torch.randn(4, 7)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                with CommDebugMode() as counted:
                    before = sequence()
                    ckpt.step()
                    handle = ckpt.save()
                    handle.wait(60.0)
                    saves.append(counted.get_total_counts() + sequence() - before)
                stream.random()
            said["saving"] = saves
            said["sharded"] = sequence() > 0
        said["own"] = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in own.items()}
        said["next"] = stream.random()
        dist.barrier()
    tell(said)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
