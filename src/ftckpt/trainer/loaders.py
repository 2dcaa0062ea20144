"""The registered data loader and its position: what was drawn, what is included, where to go on. Must not decide what is committed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakSet

import msgspec

from ftckpt.data.batches import BatchFeed
from ftckpt.data.chain import held, with_orphans
from ftckpt.data.elastic import ElasticFeed, ElasticLoader
from ftckpt.data.order import SHARED, Order, order_of, refuse, require_ordered
from ftckpt.domain.cursors import Redistribution
from ftckpt.errors import ConfigError, DataError
from ftckpt.flows.read import OpenGeneration
from ftckpt.format.manifest import Cursor
from ftckpt.trainer.drawn import Drawn
from ftckpt.trainer.orphans import DataPolicy, Heritage
from ftckpt.trainer.replicas.base import Replica
from ftckpt.trainer.session import Session

logger = logging.getLogger("ftckpt")
_SHARED_ORDER = ("record", "after_seek", "unmoved")  # options that may be there where the order is the job's and not the loader's


class Loaders:
    """This rank's loader; one per job, since a generation binds one count of draws to each replica.

    Attributes:
        name: its name; empty without a loader.
        order: what decides the order of its samples; None without a loader, and where its position is not kept.
        entering: called before the first batch of each loop; may refuse.
    """

    def __init__(self) -> None:
        self._loader: Iterable[Any] | ElasticLoader | None = None
        self.name, self._kept = "", True
        self._feed: BatchFeed | None = None  # the newest, which knows what was drawn
        self._feeds: WeakSet[BatchFeed] = WeakSet()  # all that a loop may go on with
        self.order: Order | None = None
        self.entering: Callable[[], None] | None = None
        self._drawn = Drawn()
        self._policy, self._heritage, self._lost = DataPolicy(), Heritage(), False
        self._loaded = ""  # trajectory of the state that was loaded last
        self._settled = False  # it is known whether that state is the one that goes on

    @property
    def kind(self) -> str:
        """What it is: "elastic" (the position is the shared state's), "own" (each rank has one), or "" without a loader."""
        return "" if self._loader is None else "elastic" if isinstance(self._loader, ElasticLoader) else "own"

    def add(self, name: str, loader: Iterable[Any] | ElasticLoader, *, cursor: bool = True) -> None:
        """Register it.

        Args:
            cursor: whether its position is kept; if not, it begins anew when this replica starts again.

        Raises:
            ConfigError: there is one already, its position is the job's and always kept, or nothing could say where it is.
        """
        if not cursor and isinstance(loader, ElasticLoader):
            raise ConfigError(f"loader {name!r}: an ElasticLoader has no position of its own to leave out", todo="leave out cursor=False")
        if self._loader is not None:
            raise ConfigError(
                f"loader {name!r} cannot be registered: {self.name!r} is the job's loader already",
                now="nothing was changed",
                todo='register one loader; keep others with scope="replica" if they have state_dict/load_state_dict',
            )
        if not hasattr(loader, "__iter__") and not isinstance(loader, ElasticLoader):
            raise ConfigError(f"loader {name!r} is a {type(loader).__qualname__}, which gives no batches", todo="give something to iterate")
        if isinstance(loader, ElasticLoader):
            order: Order | None = loader.sampler.order
        elif cursor:
            require_ordered(loader)
            order = order_of(loader)
        else:
            order = None
        self._loader, self.name, self._kept, self.order = loader, name, cursor, order

    def reordered(self, generation: OpenGeneration, replica: str, rank: int, word: Redistribution) -> tuple[str, ...]:
        """Compare what decides the order of samples with what did when a generation was made, before anything is loaded.

        Args:
            word: "restart": the data begin anew where that has changed.

        Returns:
            Words about a shared order that begins anew; none where all is as it was.

        Raises:
            DataError: the order is another one now; names what has changed.
        """
        cursors = {(info.replica, info.rank): info for info in generation.manifest.cursors}
        own = (replica, rank) in cursors
        if self.order is None or not cursors:
            return ()
        cursor = generation.cursor(*((replica, rank) if own else next(iter(cursors))))  # a shared order is in everybody's
        recorded = _order(cursor) if cursor is not None else None
        if not recorded or not (own or SHARED in (self.order["kind"], recorded.get("kind"))):
            return ()
        try:
            refuse(recorded, self.order, "nothing was loaded")
        except DataError as e:
            if word != "restart":
                raise
            return (f"{e.what}: the data begin anew",) if self.kind == "elastic" else ()
        return ()

    def words(self, *, anew: bool) -> str:
        """What must be the same on all replicas that begin from a loaded state; ``anew``: a shared order begins anew there."""
        shared = ", ".join(f"{k} {v}" for k, v in (self.order or {}).items()) + (", begun anew" if anew else "")
        return {"elastic": shared, "own": self._policy.words}.get(self.kind, "")

    def restore(self, ordinal: int, state: bytes | None) -> None:
        """A position from a generation's cursor: the loader's state after ``ordinal`` draws."""
        self._drawn.restore(ordinal, state)

    def settle(self, policy: DataPolicy, heritage: Heritage, *, lost: bool) -> None:
        """What holds for the state that was just loaded.

        Args:
            policy: the user's word.
            heritage: loaders of others to go on with from there.
            lost: the loaded position is of no use (the group had other ranks).
        """
        self._policy, self._heritage, self._lost = policy, heritage, lost
        self._loaded, self._settled = "", False
        self._release()
        if not isinstance(self._loader, Iterator):  # how far an iterator was read is known to its feed alone
            self._feed = None

    def close(self) -> None:
        """End the loader's workers."""
        self._release()
        if isinstance(self._loader, ElasticLoader):
            self._loader.close()
        self._feed = self.entering = None

    def _release(self) -> None:
        for feed in self._feeds:
            feed.close()

    def position(self, count: int) -> tuple[int, bytes | None]:
        """The newest loader state known here that includes at most ``count`` draws: (its draws, JSON or None)."""
        return self._drawn.position(count)

    def feed(self, name: str, session: Session, replica: Replica, **options: Any) -> Iterator[Any]:
        """Batches of the loader, each draw once in the trajectory.

        Raises:
            ConfigError: no loader of that name is registered, or an option does not fit it.
        """
        if self._loader is None or name != self.name:
            raise ConfigError(f"no loader {name!r} is registered", todo=f"register it: ckpt.register({name}=loader)")
        if isinstance(self._loader, ElasticLoader):
            return self._shared(self._loader, session, replica, options)
        return self._own(self._loader, session, replica, options)

    def _shared(self, loader: ElasticLoader, session: Session, replica: Replica, options: dict[str, Any]) -> ElasticFeed:
        config = session.client.config
        loader.place(config.group_world_size, config.rank)
        if strange := sorted(options.keys() - set(_SHARED_ORDER)):
            raise ConfigError(
                f"batches() of an ElasticLoader takes no {', '.join(strange)}",
                todo="give epochs and micro_batch to its ElasticSampler, ranks and own to it itself, and audit=True instead of ids",
            )
        order = loader.sampler.order

        def agree() -> None:
            refuse(
                replica.share(order),
                order,
                "nothing was drawn; the other replicas go on",
                "start this replica with the settings of the others",
            )

        def members() -> tuple[int | None, int]:
            agree()  # before the quorum, so that those who heal by it hear of it
            found = replica.members()
            agree()  # the state may be a peer's now
            return found

        return ElasticFeed(
            loader,
            position=lambda: replica.samples,
            members=members,
            votes=lambda: replica.votes,
            contribute=replica.contribute,
            drawn=lambda: _included(replica),
            record=options.get("record"),
            entering=self.entering,
        )

    def _own(self, loader: Iterable[Any], session: Session, replica: Replica, options: dict[str, Any]) -> BatchFeed:
        if not self._kept:
            why = f"the position of loader {self.name!r} is not kept (cursor=False): when this replica starts again, its data come again"
            logger.warning(why)
            session.client.note("cursors-off", why)

        def journal(ordinal: int, state: bytes) -> None:
            if self._kept:
                self._drawn.add(ordinal, state, session)

        def recall(count: int) -> tuple[int, bytes] | None:
            if not self._kept or (self._lost and count == self._heritage.count):
                return None
            return self._inherited(count, self._drawn.recall(count, session), journal)

        def position() -> int:
            if replica.heals_first:
                replica.members()
            return -1 if replica.blank or not self._settle(replica) else _included(replica)

        def anew(why: str) -> bool:
            if self._kept and self._policy.word != "restart":
                return False
            logger.warning("the loader begins anew: %s", why)
            session.client.note("data", f"the loader begins anew: {why}")
            return True

        self._feed = BatchFeed(
            loader,
            journal=journal,
            recall=recall,
            position=position,
            votes=lambda: replica.votes,
            contribute=replica.contribute,
            make=self._policy.make,
            anew=anew,
            order=self.order if self._kept else {},
            entering=self.entering,
            after=self._feed,
            **options,
        )
        self._feeds.add(self._feed)
        return self._feed

    def _settle(self, replica: Replica) -> bool:
        """Whether it is known which state goes on, the loaded one or a peer's: before, the loader and its journal are left alone."""
        if self._settled or replica.step == 0:
            return True
        self._loaded = self._loaded or replica.trajectory.h
        if replica.members()[0] is None:
            return False
        self._settled = True
        self._lost = self._lost and replica.trajectory.h == self._loaded
        return True

    def _inherited(self, count: int, entry: tuple[int, bytes] | None, journal: Callable[[int, bytes], None]) -> tuple[int, bytes] | None:
        """The position with the loaders of others that are taken over at the state that was loaded."""
        at, links = self._heritage.count, self._heritage.links
        if not links or (entry is None and count > 0) or (entry is not None and (entry[0] > at or held(entry[1]))):
            return entry
        if count > at:
            raise DataError(
                f"whether the data of {', '.join(link.replica for link in links)} were taken over after draw {at} is not known here",
                now="nothing was drawn",
                todo="bring back the cursor journal of this replica, or start all replicas from one generation",
            )
        spot = with_orphans(entry[1] if entry is not None else None, count - (entry[0] if entry is not None else 0), links)
        journal(count, spot)
        return count, spot


def _included(replica: Replica) -> int:
    """Draws of this replica that are included in the live state."""
    return replica.counts.get(replica.member, 0)


def _order(cursor: Cursor) -> Order | None:
    """What decided the order of samples; None in cursors of releases that did not record it."""
    state = msgspec.json.decode(cursor.state)
    return state.get("order") if isinstance(state, dict) else None


def is_loader(obj: Any) -> bool:
    """Whether something is iterated for batches: torch's and torchdata's loaders, and whatever says so itself."""
    if getattr(obj, "is_ftckpt_loader", False):
        return True
    names = {c.__name__ for c in type(obj).__mro__}
    return bool(names & {"DataLoader", "StatefulDataLoader"}) and hasattr(obj, "__iter__")
