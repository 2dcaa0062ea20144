"""Real etcd clusters on this machine for tests: members started together, and which of them leads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from ftckpt.errors import DeadlineExceeded
from ftckpt.testing.etcd_server import EtcdServer, free_ports


class EtcdCluster:
    """Several members of one etcd cluster. ``with`` starts them all and waits for them.

    Args:
        members: how many.
        options: for each member, as for :class:`EtcdServer`.
        fsync: whether they sync their logs to disk.
        hosts: address of this machine for each member; loopback when left out.
        directory: where each member has its data, under its name; temporary ones when left out.
    """

    def __init__(
        self, members: int = 3, *, options: Sequence[str] = (), fsync: bool = True, hosts: Sequence[str] = (), directory: Path | None = None
    ) -> None:
        ports, at = free_ports(2 * members), list(hosts) or ["127.0.0.1"] * members
        names = [f"m{i}" for i in range(members)]
        cluster = ",".join(f"{name}=http://{at[i]}:{ports[2 * i + 1]}" for i, name in enumerate(names))
        self.members = [
            EtcdServer(
                name, options=options, cluster=cluster, ports=(ports[2 * i], ports[2 * i + 1]), fsync=fsync, host=at[i],
                directory=directory / name if directory is not None else None,
            )
            for i, name in enumerate(names)
        ]  # fmt: skip

    @property
    def endpoints(self) -> tuple[str, ...]:
        """``host:port`` of each member."""
        return tuple(member.endpoint for member in self.members)

    @property
    def url(self) -> str:
        """A log URL with all members."""
        return f"etcd://{','.join(self.endpoints)}"

    def __enter__(self) -> Self:
        try:
            for member in self.members:
                member.start()
            for member in self.members:
                member.wait_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """End all members."""
        for member in self.members:
            member.stop()

    def leader(self, seconds: float = 10.0) -> EtcdServer:
        """The member that leads at present.

        Raises:
            DeadlineExceeded: there is none within that time.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for member in self.members:
                try:
                    if member.pid and member.is_leader():
                        return member
                except OSError:
                    continue
            time.sleep(0.05)
        raise DeadlineExceeded(f"no leader among {', '.join(self.endpoints)}")
