"""The calls of a training loop: batches, the end of a step, saves, and where the state stands. They do nothing themselves; a rank's parts do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ftckpt.data.whole import whole
from ftckpt.domain.trajectory import Trajectory
from ftckpt.errors import ConfigError
from ftckpt.trainer.handle import SaveHandle
from ftckpt.trainer.rank import Rank
from ftckpt.trainer.replicas.base import Outcome, Replica


class LoopCalls:
    """What a checkpointer is asked for between ``resume()`` and ``close()``.

    Attributes:
        settings: what this process was told.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank, self.settings = rank, rank.settings

    def batches(self, name: str = "loader", *, audit: bool = False, **options: Any) -> Iterator[Any]:
        """Batches of the registered loader, each draw exactly once in the trajectory: a batch whose step was not committed
        comes again. Of an ``ElasticLoader`` the iterator's ``share`` says what the batch is and how its loss is weighed.

        Args:
            name: the loader's name.
            audit: record sample ids for ``ftckpt data audit``.
            options: as for ``data.BatchFeed``: ``epochs``, of the whole job, counted from its beginning; ``draws_per_step``, the
                batches that a step takes at most (gradient accumulation; 1 where it is left out); ``samples_of`` ... ``ids``, a function
                that gives a batch's sample ids, turns the audit on; ``ranks`` and ``own``, where ranks of the group draw the same samples
                (tensor parallelism): how many parts the group's data are in, and which this rank draws. An ``ElasticLoader`` knows all
                this and takes none of these options.

        Raises:
            ConfigError: no loader has that name, or an option does not fit it. Also out of the loop, before another batch of the same step
                than ``draws_per_step`` allows, and where a loop begins between ``optimizer.step()`` and ``step()``.
            DataError: out of the loop: the loader cannot be put where the state says.
        """
        self._rank.need_resumed("batches()")
        if name in self._rank.registry:
            raise ConfigError(
                f"{name!r} was registered as a state and not as a loader",
                now="nothing was drawn",
                todo=f'register it with ckpt.add({name!r}, loader, kind="loader"), or set is_ftckpt_loader = True on its class',
            )
        if audit or "ids" in options:
            if self._rank.loaders.kind == "own" and "ids" not in options:
                raise ConfigError("audit=True needs ids, a function that gives a batch's sample ids", todo="give ids=")
            self._rank.ledger.open(self.settings, self.replica, self._rank.group.rank, self._rank.group.world_size)
            options.setdefault("record", self._rank.ledger)
        if self._rank.loaders.kind == "own":
            _parts(options, self._rank.group.world_size)
        moving = {"after_seek": self._rank.loader.rng_after_seek, "unmoved": self._rank.registry.generators}
        feed = self._rank.loaders.feed(name, self._rank.session, self.replica, **moving, **options)
        if "record" not in options:
            self._rank.ledger.forgo()
        return feed

    def step(self, metrics: Mapping[str, float] | None = None) -> Outcome:
        """Tell that the optimizer's step is over; saves where the policy says so.

        Args:
            metrics: numbers to keep with a generation made at this step.

        Returns:
            What became of the step.

        Raises:
            FtckptError: a failure in the background (of an earlier save, of the agent).
            Diverged: this state is not on the log's trajectory: end this process.
        """
        self._rank.need_resumed("step()")
        return self._rank.training.step(self.replica, metrics or {})

    @property
    def committed(self) -> bool:
        """Whether the step that the optimizer has just made counts: step learning-rate schedulers only then."""
        return self.replica.committed

    def save(self, wait: bool | float = False, metrics: Mapping[str, float] | None = None) -> SaveHandle:
        """Save the state of the last committed step now. On all ranks of a group alike.

        Args:
            wait: True (up to ``deadlines.close_s``) or seconds: wait until the generation is in the log.
            metrics: numbers to keep with it.

        Returns:
            A handle with ``captured``, ``persisted``, ``committed``, ``generation`` and ``location``.

        Raises:
            ConfigError: nothing was committed since ``resume()``; or, without torchft, an optimizer has stepped with a batch that no
                ``step()`` has counted yet.
            FtckptError: a failure in the background, of something earlier. In a group of several ranks this save was made all the same: the
                others may not know of the failure, and make theirs.
        """
        self._rank.need_resumed("save()")
        handle = self._rank.training.save(self.replica, metrics or {})
        if wait:
            handle.wait(self.settings.deadlines.close_s if wait is True else float(wait))
        return handle

    def captured(self) -> None:
        """Wait until the last save is captured. On a CPU it is when ``save()`` or ``step()`` returns; an accelerator copies meanwhile,
        and any optimizer's step waits for that by itself. Call this before anything else changes registered parameters or optimizer
        state in place: an EMA, clipped or tied weights, a ``load_state_dict``. SIGKILL of this process loses the save before, not after.

        Raises:
            FtckptError: a failure in the background, also of that copy.
        """
        self._rank.need_resumed("captured()")
        self._rank.training.captured()
        self._rank.background.check(self.replica)

    @property
    def waiting(self) -> int:
        """Saves of this rank that are not in the log yet, for a metric: while the log does not answer it grows, and nothing else stops."""
        return self._rank.background.waiting + self._rank.session.copying

    @property
    def current_step(self) -> int:
        """The committed step of the live state."""
        return self.replica.step

    @property
    def trajectory(self) -> Trajectory:
        """The identity of the live state."""
        return self.replica.trajectory

    @property
    def replica(self) -> Replica:
        """This replica; without torchft one that stands alone."""
        return self._rank.replica


def _parts(options: dict[str, Any], ranks: int) -> None:
    """How a group's data are shared out to its ranks: as the script says, else to each rank its own. Raises ConfigError."""
    if ("ranks" in options) != ("own" in options):
        raise ConfigError(
            f"batches() was given only {'ranks' if 'ranks' in options else 'own'}",
            now="nothing was drawn",
            todo="give both or neither: ranks, how many parts the group's data are in, and own, which of them this rank draws",
        )
    whole("batches()", "ranks", options.setdefault("ranks", ranks), 1, ranks + 1)
