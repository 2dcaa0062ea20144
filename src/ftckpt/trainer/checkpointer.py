"""The one object that a training script uses: its calls, their words and their checks. It does nothing itself; a rank's parts do (``rank``).

Here are the calls until training begins, and the end; those of the training loop are in ``looping``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from ftckpt import config
from ftckpt.domain.cursors import Redistribution
from ftckpt.domain.policy import Never, Policy
from ftckpt.errors import ConfigError
from ftckpt.trainer import exiting
from ftckpt.trainer.events import E
from ftckpt.trainer.given import Given
from ftckpt.trainer.loading import LoadOptions
from ftckpt.trainer.looping import LoopCalls
from ftckpt.trainer.opening import open_agent, open_parts
from ftckpt.trainer.orphans import DataPolicy
from ftckpt.trainer.rank import Rank
from ftckpt.trainer.registering import add
from ftckpt.trainer.resuming import ResumeReport
from ftckpt.trainer.states import Scope
from ftckpt.trainer.warmstart import WarmOptions, WarmReport

if TYPE_CHECKING:
    import torch

    from ftckpt.trainer.replicas.manager import FtManager


class Checkpointer(LoopCalls):
    """Saves, resumes and heals one rank of one replica. Make it with :meth:`open`, use it with ``with``.

    Attributes:
        settings: what this process was told.
        group: the ranks of this replica.
        read_only: whether saves do nothing (see ``open``).
    """

    read_only = False

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank)
        self.group, self.registry = rank.group, rank.registry

    # ------------------------------------------------------------------ life
    @classmethod
    def open(
        cls,
        job: str | None = None,
        root: str | os.PathLike[str] | None = None,
        log: str | None = None,
        *,
        policy: Policy | None = None,
        replica: str | None = None,
        settings_file: str | None = None,
        read_only: bool = False,
        **options: Any,
    ) -> Checkpointer:
        """Open a job for training: check everything, start (or find) this rank's agent.

        Args:
            job: name of the training run.
            root: where generations are stored: a path or URL.
            log: URL of the commit log; left out: SQLite beside the generations.
            policy: when to save, e.g. ``Every(steps=500) | AtEnd()``; left out: only when ``save()`` is called.
            replica: stable name of this replica group; left out: from ``REPLICA_GROUP_ID``.
            settings_file: TOML file; left out: ``ftckpt.toml`` if there is one.
            read_only: for evaluation with a training script's calls: ``resume()`` loads, saves do nothing, nothing is written
                and no agent is started.
            options: any further setting (see ``config.Settings``); explicit ones win over environment and file.

        Raises:
            ConfigError: settings that are missing, wrong or contradictory, all at once; nothing was written.
            Mismatch: the ranks of this group were told different things.
            LogUnreachable: the commit log does not answer.
            StoreError: the root cannot be written.
        """
        exiting.install()
        if policy is not None and not isinstance(policy, Policy):
            raise ConfigError(f"policy={policy!r} is no save policy", now="nothing was started", todo="use Every(steps=500) | AtEnd(), say")
        settings = config.load({"job": job, "root": root, "log": log, "replica": replica, **options}, file=settings_file)
        settings.validate(need=("job", "root"))
        if read_only:
            from ftckpt.trainer.reader import ReadOnlyCheckpointer

            return ReadOnlyCheckpointer.of(settings)
        parts = open_parts(settings, write=True)
        try:
            client = open_agent(settings, parts)
        except BaseException:
            parts.close()
            raise
        return cls(Rank(settings, policy if policy is not None else Never(), parts, client, config.launch().resume, reads_only=False))

    def close(self) -> None:
        """End in order: a last save where the policy says so, then wait for what is in flight. May be called twice.

        Raises:
            FtckptError: a background failure that was not raised yet.
            DeadlineExceeded: saves are still in flight after ``deadlines.close_s``; the agent goes on with them.
        """
        self._rank.close(ending=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self._rank.close(ending=True)
            return
        try:
            self._rank.close(ending=False)
        except Exception as e:  # noqa: BLE001  (the training's own error goes on; this one is told with it)
            error.add_note(f"while closing the checkpointer: {type(e).__name__}: {e}")

    # ------------------------------------------------------------------ setting up
    def torchft_manager(
        self,
        pg: Any,
        min_replica_size: int | None = None,
        *,
        max_replicas: int | None = None,
        **options: Any,
    ) -> FtManager:
        """Build torchft's ``Manager`` for this replica: trajectory, one-state rule, heal through our agents.

        Args:
            pg: torchft process group across replicas.
            min_replica_size: fewest replicas that may train.
            max_replicas: most replicas that ever run at once; ``2 * min_replica_size > max_replicas`` is then checked.
            options: as for ``replicas.torchft.build_manager`` (``lighthouse``, ``use_async_quorum``, ``allow_split``, ``timeouts`` ...).

        Raises:
            ConfigError: contradictory options, all at once; or it was called twice or after ``resume``.
        """
        return self._rank.join(pg, min_replica_size, max_replicas, options)

    def optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
        """The optimizer as this job needs it: torchft's wrapper (which decides commits) with torchft, else as it is."""
        if self._rank.manager is None:
            return optimizer
        from torchft.optim import OptimizerWrapper

        return OptimizerWrapper(self._rank.manager, optimizer)

    def hook(self, model: torch.nn.Module) -> torch.nn.Module:
        """Average this model's gradients over the replicas, whatever wraps it (plain, DDP, FSDP2), so that a peer's death costs
        one uncommitted step and not the process. Once, after wrapping; nothing without torchft. Returns the model."""
        if self._rank.manager is not None:
            from ftckpt.trainer.replicas.hooks import safe_allreduce_hook

            safe_allreduce_hook(self._rank.manager, model)
        return model

    def register(self, **states: Any) -> None:
        """Register what the job's state is made of, by name: models, optimizers, schedulers, scalers, the loader, anything
        with ``state_dict``/``load_state_dict``, pairs of functions, dicts.

        Raises:
            ConfigError: a name is taken, or an object cannot be kept.
        """
        for name, obj in states.items():
            self.add(name, obj)

    def add(
        self, name: str, obj: Any, *, kind: Any = "auto", scope: Scope = "shared", only_trainable: bool = False, cursor: bool = True
    ) -> None:
        """Register one state with options.

        Args:
            kind: "auto", "module", "optimizer", "tree", or "loader" for an iterable of batches that is not taken for one by itself.
            scope: "shared" (one for all replicas) or "replica" (each rank's own).
            only_trainable: models: leave out what needs no gradient.
            cursor: the loader: False does not keep its position; it begins anew at each start, with a warning.
        Raises ConfigError: the name is taken, the object is of no known kind, or an option is none of its kind; or after ``resume()``.
        """
        if self._rank.resumed:
            raise ConfigError(
                f"{name!r} is registered after resume(): its stored value would not be loaded, and the next save would replace it",
                now="nothing was changed",
                todo="register every state before resume()",
            )
        add(self.registry, self._rank.loaders, name, obj, kind=kind, scope=scope, only_trainable=only_trainable, cursor=cursor)

    # ------------------------------------------------------------------ resuming
    def resume(
        self,
        *,
        step: int | None = None,
        generation: int | str | None = None,
        fresh: bool = False,
        what: Literal["all", "weights"] = "all",
        exclude: Collection[str] = (),
        sources: Mapping[str, str | Sequence[str]] | None = None,
        strict: Any = "exact",
        on_mismatch: Any = "error",
        data: Redistribution = "strict",
        replicas: Collection[str] = (),
        loaders: Callable[[str], Iterable[Any]] | None = None,
    ) -> ResumeReport:
        """Take the newest completed generation (or what was asked for) into the registered objects, or begin at zero.

        Args:
            step: exactly this step's generation.
            generation: exactly this one: index in the log, or directory name.
            fresh: begin at zero whatever exists.
            what: "weights" loads models only; the other states stay as they are. Steps and data position go on.
            exclude: names of states to leave alone.
            sources: live name -> stored name, or several in order of preference: ``{"model": ["ema", "model"]}``.
            strict, on_mismatch: as in ``trainer.restore``.
            data: of loaders that are not an ``ElasticLoader``. "strict": a position that nobody continues is an error. "adopt": the
                data of replicas that are gone are gone on with. "restart": they are let go, and a loader that cannot be put
                where the state says begins anew. See docs/data.md.
            replicas: names of all replicas of the job from now on, the same for each; without torchft this one alone. Left
                out: nobody is taken for gone.
            loaders: for "adopt": makes the loader that another replica had, by its name.

        Raises:
            ProgressExists, NothingLoadable, NotFound, Damaged, Mismatch, DataError, LogUnreachable: nothing was started; says why.
        """
        if what not in ("all", "weights"):
            raise ConfigError(f"resume(what={what!r}) is not known", now="nothing was loaded", todo='use what="all" or what="weights"')
        if data not in get_args(Redistribution):
            known = ", ".join(map(repr, get_args(Redistribution)))
            raise ConfigError(f"resume(data={data!r}) is not known", now="nothing was loaded", todo=f"use one of {known}")
        given = Given()
        given.names("replicas", replicas)
        given.refuse(now="nothing was loaded")
        options = LoadOptions(
            only=[s.name for s in self.registry if s.kind == "module"] if what == "weights" else None,
            exclude=exclude,
            sources=sources,
            strict=strict,
            on_mismatch=on_mismatch,
            with_cursor=what == "all",
            data=DataPolicy(word=data, replicas=tuple(sorted(replicas)) or self._rank.alone(), make=loaders),
        )
        self._rank.await_agent()
        report = self._rank.starter.resume(options, step, generation, fresh)
        self._rank.ready(report)
        return report

    def load_ahead(
        self, *names: str, step: int | None = None, generation: int | str | None = None, strict: Any = "exact", sources: Any = None
    ) -> ResumeReport:
        """Load some of the registered states before the others exist, from the very generation that ``resume()`` will take: weights
        before the model is wrapped, then the optimizer of the wrapped parameters. Nothing happens where there is none yet.

        Args:
            names: states to load now; ``resume()`` leaves them alone.
            step, generation: as for ``resume``, which then takes neither.
            strict, sources: as for ``resume``.

        Raises:
            FtckptError: as ``resume``.
        """
        self._rank.await_agent()
        return self._rank.starter.ahead(names, LoadOptions(sources=sources, strict=strict), step, generation)

    def warm_start(
        self,
        source: str | os.PathLike[str],
        *,
        force: bool = False,
        **options: Any,
    ) -> WarmReport:
        """Begin a new job with given weights. Call it between ``register()`` and ``resume()``, in every start alike: once the job
        has generations it is passed over with a warning that names what ``resume()`` takes instead. Steps begin at 0.

        Args:
            source: path of a generation or job of ftckpt (or a job's name), of safetensors (a file, or a directory with or without
                index), of a ``.pt`` file, of a DCP directory.
            options: as for ``WarmOptions``: ``what``, ``format``, ``state``, ``key``, ``name_map``, ``hooks``, ``sources``, ``strict``,
                ``on_mismatch``, ``root``, ``log``, ``step``.
            force: load, and begin at step 0 whatever the job has; passed over when torchrun restarts a worker.

        Raises:
            Mismatch: what does not fit, all at once. NotFound, Damaged, ConfigError: the source cannot be used.
            LogUnreachable, ProgressExists: it cannot be told whether the job has generations.
        """
        if strange := sorted(options.keys() - set(WarmOptions.__struct_fields__)):
            raise ConfigError(
                f"warm_start() has no option {', '.join(strange)}", todo=f"it has {', '.join(WarmOptions.__struct_fields__)} and force"
            )
        told = WarmOptions(**options)
        self._rank.await_agent()
        return self._rank.starter.warm_start(source, told, force=force)

    def on(self, kind: type[E], callback: Callable[[E], object]) -> None:
        """Call ``callback`` with every event of a kind (``ftckpt.Saving``, ``Captured``, ``Committed``, ``Resuming``,
        ``Resumed``, ``WarmStarted``, ``Healed``; ``Event`` for all), on the main thread; what it raises comes out of that call."""
        self._rank.events.on(kind, callback)
