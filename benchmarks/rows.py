"""Which parties run in which benchmark, and which of their figures are set side by side, with the targets. Values only.

A figure is named ``module.party.key``. Ratios are always ours divided by the other, so that smaller is better and a target is an upper bound.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Peer:
    """Another checkpointer's figure, and the ratio of ours to it that is aimed at (None: for information)."""

    name: str
    key: str
    target: float | None = None


@dataclass(frozen=True)
class Row:
    """One figure of ours beside a limit (the best of several figures, or a fixed number of seconds) and peers."""

    name: str
    what: str
    ours: str
    limit: tuple[str, ...] | float
    limit_is: str
    target: float | None
    peers: tuple[Peer, ...] = ()


@dataclass(frozen=True)
class Bench:
    """Parties that take turns, and the rows made of their figures."""

    title: str
    parties: tuple[str, ...]
    rows: tuple[Row, ...]


CHUNKS_MB = 2 * (1 << 20) / 1e6  # two threads, blocks of 1 MiB
DIRECT = ("limits.write.direct", "limits.write.direct2", "limits.write.huge", "limits.write.huge2")

TRAIN_PARTIES = ("ours.train_all_cores", "ours.train_spare_core")
TRAIN_ROWS = (
    Row("train.meanwhile", "a training step while persisting, all cores busy", "ours.train_all_cores.meanwhile", ("ours.train_all_cores.alone",),
        "a step alone", 1 / 0.9),
    Row("train.meanwhile.spare", "a training step while persisting, one thread", "ours.train_spare_core.meanwhile",
        ("ours.train_spare_core.alone",), "a step alone", 1 / 0.95),
    Row("train.persist", "save() returned -> committed, all cores busy", "ours.train_all_cores.committed", ("ours.train_all_cores.idle",),
        "until committed, idle", 3.0),
)  # fmt: skip

_LOOPBACK = tuple(f"limits.loopback.copy{n}" for n in (1, 2, 4))
_HEALS = (
    Peer("torchft HTTP, whole", "peers.torchft_http_whole.heal", 0.5),
    Peer("torchft HTTP, 4 chunks", "peers.torchft_http_chunks.heal", 0.5),
    Peer("torchft over Gloo, in place, unchecked", "peers.torchft_gloo.heal", 1.0),
)

BENCHES = {
    "save": Bench(
        "what training waits for, and until a generation is committed (etcd)",
        (
            "limits.memcpy", "limits.write", "ours.save", "peers.torch_save", "peers.safetensors_save", "peers.dcp_save", "peers.dcp_async_save",
            *TRAIN_PARTIES,
        ),
        (
            Row("save.wait", "save(): training waits", "ours.save.wait", ("limits.memcpy.copy",), "warm memcpy", 1.2,
                (Peer("DCP async_save: wait", "peers.dcp_async_save.wait", 0.2),)),
            Row("save.bound", "one warm memcpy, which no save() on a CPU can do without", "limits.memcpy.copy", ("peers.dcp_async_save.wait",),
                "DCP async_save: wait", None),
            Row("save.wait.first", "the first save()", "ours.save.first", ("limits.memcpy.copy",), "warm memcpy", 2.0),
            Row("save.committed", "save() returned -> committed", "ours.save.committed", DIRECT, "O_DIRECT write+fsync, the best", 1.3,
                (
                    Peer("O_DIRECT, small pages", "limits.write.direct"),
                    Peer("buffered write+fsync", "limits.write.buffered"),
                    Peer("torch.save+fsync", "peers.torch_save.write", 0.5),
                    Peer("safetensors+fsync", "peers.safetensors_save.write"),
                    Peer("DCP save", "peers.dcp_save.write"),
                    Peer("DCP async_save: written", "peers.dcp_async_save.written"),
                )),
            *TRAIN_ROWS,
        ),
    ),
    "train": Bench("training while the agent persists", TRAIN_PARTIES, TRAIN_ROWS),
    "load": Bench(
        "restore: verified load into live tensors",
        ("peers.mmap_load", "ours.load", "ours.load_small", "peers.torch_load", "peers.dcp_load"),
        (
            Row("resume.load", "verified load into live tensors", "ours.load.load", ("peers.mmap_load.load",), "mmap load+copy, unverified", 1.4,
                (Peer("torch.load", "peers.torch_load.load"), Peer("DCP load", "peers.dcp_load.load", 0.2))),
            Row("resume.whole", "resume() with choice, log and plan of captures", "ours.load.resume", ("peers.mmap_load.load",),
                "mmap load+copy, unverified", None, (Peer("DCP load", "peers.dcp_load.load"),)),
            Row("resume.fixed", "resume() of 1 MB", "ours.load_small.resume", ("ours.load.resume",), "of the whole state", None),
            Row("resume.extra", "peak memory besides the state, in MB", "ours.load.extra", CHUNKS_MB, "one block per thread", 1.0,
                (
                    Peer("mmap load+copy (mapped pages)", "peers.mmap_load.extra"), Peer("torch.load", "peers.torch_load.extra"),
                    Peer("DCP load", "peers.dcp_load.extra"),
                )),
        ),
    ),
    "many": Bench(
        "capture of 200 000 small tensors",
        ("limits.many_copies", "ours_many.optimizer", "ours_many.buffers"),
        (
            Row("many.capture", "a capture, parameters and AdamW's state", "ours_many.optimizer.capture", ("limits.many_copies.copies",), "as many copy_", 2.0,
                (Peer("_foreach_copy_", "limits.many_copies.foreach"),)),
            Row("many.first", "the first, with the plan", "ours_many.optimizer.first", ("limits.many_copies.copies",), "as many copy_", None),
            Row("many.buffers", "a capture, buffers (copied twice)", "ours_many.buffers.capture", ("limits.many_copies.copies",), "as many copy_", None),
        ),
    ),
    "heal": Bench(
        "from another process to applied",
        ("limits.loopback", "limits.memcpy", "ours_heal.heal", "peers.torchft_http_whole", "peers.torchft_http_chunks", "peers.torchft_gloo"),
        (
            Row("heal", "request -> state applied (a joiner that just began)", "ours_heal.heal.near", _LOOPBACK, "best raw loopback copy", 1.3, _HEALS),
            Row("heal.wire", "the same over the socket, as between hosts", "ours_heal.heal.wire", _LOOPBACK, "best raw loopback copy", 1.3,
                (
                    Peer("loopback, 1 connection", "limits.loopback.copy1"),
                    Peer("loopback, 2 connections", "limits.loopback.copy2"),
                    Peer("loopback, 4 connections", "limits.loopback.copy4"),
                    *_HEALS,
                )),
            Row("heal.kept", "the same where the joiner's own state is kept until all is there", "ours_heal.heal.kept",
                _LOOPBACK, "best raw loopback copy", None,
                (Peer("into live memory as it comes", "ours_heal.heal.wire"),)),
            Row("heal.whole", "with the survivor's capture before it", "ours_heal.heal.both", ("peers.torchft_http_whole.heal", "peers.torchft_http_chunks.heal"),
                "torchft HTTP, the better", None),
            Row("heal.survivor", "the survivor's own work", "ours_heal.heal.capture", ("limits.memcpy.copy",), "warm memcpy", 1.3),
        ),
    ),
    "recovery": Bench(
        "a replica of a running job is killed and started again",
        ("recovery.ours", "recovery.plain"),
        (
            Row("recovery", "kill -> first step with both", "recovery.ours.whole", ("recovery.plain.whole",), "plain torchft", None),
            Row("recovery.detect", "the survivor is past the lost step", "recovery.ours.detect", ("recovery.plain.detect",), "plain torchft", None),
            Row("recovery.restart", "kill -> ready for its first quorum", "recovery.ours.restart", ("recovery.plain.restart",), "plain torchft", None),
            Row("recovery.begin", "of that: model, manager; open(), resume()", "recovery.ours.begin", ("recovery.plain.begin",), "plain torchft", None),
            Row("recovery.quorum", "ready -> told whom to heal from", "recovery.ours.quorum", ("recovery.plain.quorum",), "plain torchft", None),
            Row("recovery.transfer", "fetching the state", "recovery.ours.transfer", ("recovery.plain.transfer",), "plain torchft, HTTP", None),
            Row("recovery.apply", "into the live state", "recovery.ours.apply", ("recovery.plain.apply",), "plain torchft", None),
            Row("recovery.stall", "the survivor waits", "recovery.ours.stall", ("recovery.ours.heal",), "transfer and apply", 1.1,
                (Peer("plain torchft: waits", "recovery.plain.stall"),)),
        ),
    ),
    "step": Bench(
        "what a step costs without any save",
        (
            "ours.cursor", "ours.cursor_while_persisting", "peers.dcp_async_loader", "torchft_steps.own_loader", "torchft_steps.elastic_loader",
        ),
        (
            Row("step.cursor", "cursor per step, beyond the loader's own state_dict()", "ours.cursor.cursor", 0.001, "1 ms", 1.0,
                (Peer("DCP async_save each step", "peers.dcp_async_loader.step"),)),
            Row("step.cursor.persisting", "the same while a save is persisted", "ours.cursor_while_persisting.cursor", 0.001, "1 ms", 1.0,
                (Peer("DCP async_save each step", "peers.dcp_async_loader.step"),)),
            Row("step.elastic", "a step with forward on the shared order, quorum first", "torchft_steps.elastic_loader.step",
                ("torchft_steps.own_loader.step",), "a loader of each replica's own, quorum during forward", None),
        ),
    ),
    "objects": Bench(
        "an object store on loopback (S3 protocol)",
        ("ours_objects.raw", "ours_objects.persist"),
        (
            Row("objects.persist", "save() returned -> this rank's part is stored", "ours_objects.persist.persisted", ("ours_objects.raw.put",),
                "raw upload, same library", None),
            Row("objects.committed", "save() returned -> committed", "ours_objects.persist.committed", ("ours_objects.raw.put",),
                "raw upload, same library", None),
        ),
    ),
    "reuse": Bench(
        "a frozen model with an adapter that trains",
        ("ours_objects.frozen_whole", "ours_objects.frozen_reused"),
        (
            Row("reuse.committed", "save() returned -> committed, unchanged tensors left out", "ours_objects.frozen_reused.committed",
                ("ours_objects.frozen_whole.committed",), "the same, saved whole", None),
        ),
    ),
    "trajectory": Bench(
        "what it costs that replicas compare their histories in each step",
        tuple(f"torchft_steps.{name}{n}" for n in ("1", "", "3") for name in ("plain", "ours")),
        (
            Row("trajectory.1", "a step of one torchft replica, alone", "torchft_steps.ours1.step", ("torchft_steps.plain1.step",),
                "torchft's own Manager", None),
            Row("trajectory.2", "a step of two", "torchft_steps.ours.step", ("torchft_steps.plain.step",), "torchft's own Manager", None),
            Row("trajectory.3", "a step of three", "torchft_steps.ours3.step", ("torchft_steps.plain3.step",), "torchft's own Manager", None),
        ),
    ),
    "commit": Bench(
        "commits in etcd",
        ("limits.etcd_transaction", "ours.commit", "ours_log.raw_jobs", "ours_log.jobs"),
        (
            Row("commit", "append a record", "ours.commit.append", ("limits.etcd_transaction.txn",), "one raw transaction", 2.0),
            Row("commit.jobs", "append a record, 8 jobs at once", "ours_log.jobs.append", ("ours_log.raw_jobs.txn",), "8 raw transactions at once", 2.0),
            Row("commit.jobs.whole", "the same with the read of the tail before it", "ours_log.jobs.whole", ("ours_log.raw_jobs.txn",),
                "8 raw transactions at once", None),
        ),
    ),
    "log": Bench(
        "the commit log of a large job in etcd",
        ("ours_log.listing", "ours_log.replicas"),
        (
            Row("log.list", "list of 10 000 entries, decoded", "ours_log.listing.list", ("ours_log.listing.raw",), "the same keys, raw", None),
            Row("log.register", "1 000 replicas register", "ours_log.replicas.register", 15.0, "life of a line, 15 s", 1.0),
            Row("log.period", "all calls of 1 000 replicas in 5 s", "ours_log.replicas.period", 5.0, "5 s, one client process", 1.0),
            Row("log.cpu", "etcd's CPU for these calls", "ours_log.replicas.cpu", 5.0, "5 s, one core", 1.0),
            Row("log.see", "the lines of 1 000 replicas are read", "ours_log.replicas.see", 1.0, "1 s", None),
        ),
    ),
    "restart": Bench(
        "torchrun after a killed worker",
        ("torchrun_restart.worker_v3", "torchrun_restart.worker_c10d", "torchrun_restart.worker_etcd", "torchrun_restart.worker_v2"),
        (
            Row("restart.worker", "etcd-v3: SIGKILL of one of two workers -> both met again", "torchrun_restart.worker_v3.again",
                ("torchrun_restart.worker_c10d.again",), "c10d, no etcd", None,
                (Peer("etcd", "torchrun_restart.worker_etcd.again"), Peer("etcd-v2", "torchrun_restart.worker_v2.again"))),
        ),
    ),
    "reform": Bench(
        "torchrun --nnodes=1:2 after a killed node",
        ("torchrun_restart.node_v3", "torchrun_restart.node_etcd", "torchrun_restart.node_v2"),
        (
            Row("restart.node", "etcd-v3: SIGKILL of one of two nodes -> the other works alone", "torchrun_restart.node_v3.again",
                ("torchrun_restart.node_v2.again",), "etcd-v2, same settings", None, (Peer("etcd", "torchrun_restart.node_etcd.again"),)),
        ),
    ),
}  # fmt: skip
