"""One rank of a replica group in a process of its own, told step by step over a pipe what to do; its log and its carrier are plain files."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from ftckpt.domain.ledger import Entry
from ftckpt.domain.trajectory import Trajectory
from ftckpt.errors import DeadlineExceeded, FtckptError, LogUnreachable, PeerError
from ftckpt.trainer.replicas.base import Callbacks, Position
from ftckpt.trainer.replicas.bounds import Limits
from ftckpt.trainer.replicas.hooks import ddp, safe_allreduce_hook
from ftckpt.trainer.replicas.torchft import FtReplica, Timeouts, build_manager
from ftckpt.trainer.replicas.vector import StepVector

STEP_TIMEOUT = 5.0


class FileLog:
    """A commit log in one JSON file that the test writes; ``down`` beside it makes it unreadable."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.known: Entry | None = None

    def tail(self) -> Entry | None:
        if (self.root / "down").exists():
            raise LogUnreachable("the log is down")
        path = self.root / "log.json"
        entries = msgspec.json.decode(path.read_bytes(), type=list[Entry]) if path.exists() else []
        self.known = entries[-1] if entries else None
        return self.known


class FileCarrier:
    """Published states as directories: tensors raw, bytes and numbers as JSON."""

    def __init__(self, root: Path, name: str, fails: int) -> None:
        self.spoil: Callable[[], None] = lambda: None  # what a heal that fails half way does to the live state
        self.root, self.name, self.count, self.fails = root / "carried", name, 0, fails
        self.root.mkdir(exist_ok=True)

    def metadata(self) -> str:
        return json.dumps({"from": self.name})

    def publish(self, step: int, state: dict[str, Any], timeout: float) -> None:
        final = self.root / f"{self.name}-{step}-{self.count}"
        self.count += 1
        part = final.with_name(final.name + ".part")
        part.mkdir()
        leaves = {}
        for group, values in state.items():
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    (part / f"{key}.raw").write_bytes(value.numpy().tobytes())
                    value = {"raw": f"{key}.raw", "dtype": "float64"}
                elif isinstance(value, bytes):
                    value = {"text": value.decode()}
                leaves[f"{group}/{key}"] = value
        (part / "leaves.json").write_text(json.dumps(leaves))
        part.rename(final)

    def fetch(self, metadata: str, step: int, timeout: float, admit: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        try:
            state = self._assigned(metadata, step, timeout / 2)
            admit(state)
            return state
        except FtckptError as e:
            failed = e
        for path in sorted(self.root.glob("spareoffer-*")):
            state = self._read(path)
            admit(state)
            return state
        raise failed

    def _assigned(self, metadata: str, step: int, timeout: float) -> dict[str, Any]:
        until = time.monotonic() + timeout
        if self.fails:
            self.fails -= 1
            self.spoil()
            raise PeerError("the network is cut")
        while time.monotonic() < until:
            found = self._newest(json.loads(metadata)["from"], step)
            if found is not None:
                return self._read(found)
            time.sleep(0.01)
        raise DeadlineExceeded(f"{metadata} did not publish step {step}")

    def retire(self) -> None:
        pass

    def _newest(self, name: str, step: int) -> Path | None:
        found = [p for p in self.root.glob(f"{name}-{step}-*") if not p.name.endswith(".part")]
        return max(found, key=lambda p: p.stat().st_mtime_ns, default=None)

    def _read(self, path: Path) -> dict[str, Any]:
        state: dict[str, Any] = {"user": {}, "torchft": {}}
        for name, value in json.loads((path / "leaves.json").read_text()).items():
            group, key = name.split("/", 1)
            if isinstance(value, dict) and "raw" in value:
                value = torch.frombuffer(bytearray((path / value["raw"]).read_bytes()), dtype=torch.float64)
            elif isinstance(value, dict) and "text" in value:
                value = value["text"].encode()
            state[group][key] = value
        return state


class Worker:
    """The training script of the tests: one weight vector, one gradient per step."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.root, self.name = Path(spec["root"]), spec["name"]
        rank, world = spec.get("rank", 0), spec.get("world_size", 1)
        if rank == 0:
            self.store = dist.TCPStore("127.0.0.1", spec.get("store_port", 0), is_master=True, wait_for_workers=False)
        port = self.store.port if rank == 0 else spec["store_port"]
        torch.manual_seed(spec.get("seed", 0))
        self.w = torch.zeros(spec.get("size", 4), dtype=torch.float64)
        self.log = FileLog(self.root)
        self.fail_load = spec.get("fail_load", False)
        self.loaded: list[int] = []
        self.carrier = FileCarrier(self.root, f"{self.name}r{rank}", spec.get("fail_fetches", 0))
        self.manager = build_manager(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=STEP_TIMEOUT)),
            min_replica_size=spec.get("min_replica_size", 1),
            allow_split=True,
            job="job",
            replica=self.name,
            incarnation=spec.get("incarnation", f"{self.name}{time.monotonic_ns()}"),
            callbacks=Callbacks(tail=self.log.tail, known_tail=lambda: self.log.known, load_tail=self.load_tail),
            carrier=self.carrier,
            rank=rank,
            world_size=world,
            store_addr="127.0.0.1",
            store_port=port,
            lighthouse=spec["lighthouse"],
            spares=spec.get("spares", False),
            use_async_quorum=spec.get("use_async_quorum", True),
            timeouts=Timeouts(heartbeat=1.0, join=3.0, quorum=20.0, step=STEP_TIMEOUT, connect=5.0),
            limits=msgspec.convert(spec.get("limits", {"pause": 0.2}), Limits),
            port=0,
        )
        self.replica = FtReplica(self.manager)
        if spec.get("spoils", False):
            self.carrier.spoil = self.spoil
        self.manager.register_state_dict_fn("w", self.load_w, lambda: self.w.clone())
        self.model: torch.nn.Module | None = None

    def spoil(self) -> None:
        """As a heal that receives in place and loses its source half way."""
        self.spent = self.replica.spend()
        if self.spent:
            self.w[::2] = -999.0

    def load_w(self, value: Any) -> None:
        if self.fail_load:
            self.fail_load = False
            raise ValueError("the state cannot be loaded")
        self.w.copy_(value)

    # ------------------------------------------------------------------ commands
    def state(self) -> dict[str, Any]:
        r = self.replica
        return {
            "w": self.w.tolist(),
            "h": r.trajectory.h,
            "step": r.step,
            "blank": r.blank,
            "counts": {str(k): v for k, v in r.counts.items()},
            "samples": r.samples,
            "member": r.member,
            "loaded": self.loaded,
        }

    def step(self, grad: float = 1.0, draws: int = 1, fail: str = "", skip: str = "") -> dict[str, Any]:
        self.replica.contribute(draws, 2 * draws)
        started = time.perf_counter()
        self.manager.start_quorum()
        g = torch.full_like(self.w, grad)
        if skip == "after_quorum":
            self.manager.wait_quorum()
            return {"skipped": True}
        if self.model is not None:
            return self.model_step(started)
        self.manager.allreduce(g).wait()
        if fail == "late":
            self.manager.report_error(RuntimeError("late error, after the allreduce"))
        if fail == "raise":
            self.manager.before_vote(lambda: (_ for _ in ()).throw(ValueError("boom before the vote")))
        committed = self.manager.should_commit()
        if committed:
            self.w -= g
        return self.answer(committed, started)

    def answer(self, committed: bool, started: float) -> dict[str, Any]:
        out = msgspec.to_builtins(self.replica.outcome())
        return {**self.state(), **out, "vote": committed, "seconds": time.perf_counter() - started, "pid": os.getpid()}

    def steps(self, count: int, grad: float = 1.0) -> list[dict[str, Any]]:
        return [self.step(grad) for _ in range(count)]

    def until(self, step: int, grad: float = 1.0, limit: int = 40) -> dict[str, Any]:
        """Steps until the committed step is reached; the last answer, with every reason seen."""
        reasons: list[str] = []
        answer = self.state()
        for _ in range(limit):
            if self.replica.step >= step and not self.replica.blank:
                break
            answer = self.step(grad)
            reasons += answer["reasons"]
        return {**answer, "all_reasons": reasons}

    def save(self, index: int) -> dict[str, Any]:
        """Make the live state the generation of a new log entry with this index."""
        t = self.replica.trajectory
        p = Position(trajectory=t, counts=dict(self.replica.counts), samples=self.replica.samples)
        (self.root / f"generation-{index}.json").write_text(json.dumps({"w": self.w.tolist(), "position": p.encode().decode()}))
        entry = Entry(
            index=index,
            kind="generation",
            log="L",
            step=t.step,
            trajectory=t.h,
            prev=index - 1,
            base=index - 1,
            attempt="0" * 8,
            writer=self.name,
        )
        path = self.root / "log.json"
        entries = msgspec.json.decode(path.read_bytes(), type=list[Entry]) if path.exists() else []
        path.write_bytes(msgspec.json.encode([*entries, entry]))
        return {"index": index}

    def watch(self) -> dict[str, Any]:
        """The watch tells the newest tail."""
        entry = self.log.tail()
        return {"index": -1 if entry is None else entry.index}

    def load_tail(self, index: int) -> None:
        document = json.loads((self.root / f"generation-{index}.json").read_text())
        self.w.copy_(torch.tensor(document["w"], dtype=torch.float64))
        p = Position.decode(document["position"].encode())
        self.loaded.append(index)
        self.replica.adopt(p.trajectory, p.counts, p.samples, p.trajectory.step)

    def resume(self, index: int) -> dict[str, Any]:
        self.load_tail(index)
        return self.state()

    # ------------------------------------------------------------------ a real model
    def use_model(self, wrap: str, lr: float = 0.1) -> dict[str, Any]:
        torch.manual_seed(1)
        model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)).double()
        self.module = model
        if wrap == "ddp":
            model = ddp(model)
        elif wrap == "fsdp":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
            mesh = init_device_mesh("cpu", (1,))
            for layer in model:
                if isinstance(layer, torch.nn.Linear):
                    fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        safe_allreduce_hook(self.manager, model)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        self.model = model
        return {"ok": True}

    def model_step(self, started: float) -> dict[str, Any]:
        assert self.model is not None
        torch.manual_seed(hash((self.name, self.replica.step)) % 1000)
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 8, dtype=torch.float64)).square().mean().backward()
        committed = self.manager.should_commit()
        if committed:
            self.optimizer.step()
        weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in self.module.parameters()]
        answer = self.answer(committed, started)
        answer["weights"] = torch.cat([w.detach().reshape(-1) for w in weights]).tolist()
        return answer

    def compare(self, count: int) -> dict[str, Any]:
        """Median milliseconds of a step with and without the vector, in turns on the same quorum, and of its own parts."""
        spent: dict[str, list[float]] = {"with": [], "without": [], "quorum": [], "launch": [], "wait": [], "decide": []}

        def timed(name: str, real: Any) -> Any:
            def call(*arguments: Any, **options: Any) -> Any:
                started = time.perf_counter()
                value = real(*arguments, **options)
                spent[name].append(time.perf_counter() - started)
                return value

            return call

        manager = self.manager
        StepVector.launch = timed("launch", StepVector.launch)  # type: ignore[method-assign]
        manager.wait_quorum = timed("quorum", manager.wait_quorum)
        manager._slots = timed("wait", manager._slots)
        manager.standing.judge = timed("decide", manager.standing.judge)
        for n in range(count):
            name = "without" if n % 2 else "with"
            started = time.perf_counter()
            self.lean_step() if name == "with" else self.bare_step()
            if n > 10:
                spent[name].append(time.perf_counter() - started)
        return {name: round(1e3 * sorted(values)[len(values) // 2], 3) for name, values in spent.items()}

    def lean_step(self) -> None:
        self.replica.contribute(1, 2)
        self.manager.start_quorum()
        g = torch.full_like(self.w, 1.0)
        self.manager.allreduce(g).wait()
        if self.manager.should_commit():
            self.w -= g
        self.replica.outcome()

    def bare_step(self) -> None:
        """A step of torchft's own manager: no vector, no rule; for measuring only."""
        manager = self.manager
        manager.standing.begin()
        Manager.start_quorum(manager)
        g = torch.full_like(self.w, 1.0)
        Manager.allreduce(manager, g).wait()
        if Manager.should_commit(manager):
            self.w -= g
            position = manager.standing.position
            t = position.trajectory
            manager.standing.position = msgspec.structs.replace(position, trajectory=Trajectory(t.step + 1, t.h, t.links))

    def address(self) -> dict[str, Any]:
        return {"port": int(self.manager._manager.address().rsplit(":", 1)[1])}

    def close(self) -> dict[str, Any]:
        self.replica.close()
        return {"closed": True}


def main(connection: Any, spec: dict[str, Any]) -> None:
    """Serve commands until the pipe ends; every answer is a dict, a failed command's has ``error``."""
    with Path(spec["root"], f"{spec['name']}.out").open("a") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    torch.set_num_threads(1)
    worker = Worker(spec)
    connection.send({"ready": True, "pid": os.getpid(), "store_port": worker.store.port if spec.get("rank", 0) == 0 else 0})
    while True:
        try:
            name, options = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = getattr(worker, name)(**options)
        except Exception as e:
            traceback.print_exc()
            answer = {"error": type(e).__name__, "text": str(e), "code": e.exit_code if isinstance(e, FtckptError) else 1}
        connection.send(answer)
