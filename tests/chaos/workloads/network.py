"""A network of its own for one job: a namespace per unit, joined by a bridge, whose links are cut, slowed or made lossy. Needs root."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Iterable, Sequence

HUB, ETCD = 1, 11  # last numbers of addresses: lighthouse, first etcd member
UNIT = 101  # of the first unit
_RANDOM = 0xFFFFF038  # of the classic filter language: a random word
_PASS, _DROP = 0xFFFFFFFF, 2


def have_network() -> bool:
    """Whether this machine lets us make namespaces and filters (root, iproute2, veth, a classifier)."""
    if os.geteuid() != 0 or not all(shutil.which(x) for x in ("ip", "tc", "nsenter")):
        return False
    probe = Network(1)
    try:
        probe.open()
        probe.apply(0, cut=["10.0.0.1"], loss=0.1, kbit=1000)
    except (subprocess.SubprocessError, OSError):
        return False
    finally:
        probe.close()
    return True


def _run(*argv: str, check: bool = True) -> None:
    subprocess.run(argv, check=check, capture_output=True, timeout=20)


def program(cut: Sequence[str], loss: float, field: int) -> str:
    """A packet filter, as tc takes it: drop IPv4 to or from some addresses, and a share of the rest.

    Args:
        field: offset of the address in the frame: 26 its source, 30 its destination.
    """
    code: list[tuple[int, int, int, int]] = []
    if cut:
        code += [(0x28, 0, 0, 12), (0x15, 0, len(cut) + 1, 0x0800), (0x20, 0, 0, field)]  # not IPv4: past the comparisons
        for i, address in enumerate(cut):
            number = int.from_bytes(bytes(map(int, address.split("."))), "big")
            code.append((0x15, len(cut) - 1 - i + (4 if loss else 1), 0, number))
    if loss:
        code += [(0x20, 0, 0, _RANDOM), (0x35, 1, 0, int(loss * 0xFFFFFFFF)), (0x06, 0, 0, _DROP)]
    code += [(0x06, 0, 0, _PASS), (0x06, 0, 0, _DROP)]
    return f"{len(code)}," + ",".join(" ".join(map(str, c)) for c in code)


class Network:
    """Addresses 10.a.b.x: lighthouse and etcd on the bridge, each unit in its namespace.

    Args:
        units: how many.
    """

    def __init__(self, units: int) -> None:
        self.units = units
        self.tag = f"{random.SystemRandom().randrange(1 << 24):06x}"
        self.prefix = f"10.{random.SystemRandom().randrange(128, 255)}.{random.SystemRandom().randrange(1, 255)}"
        self.bridge = f"fc{self.tag}"

    def address(self, last: int) -> str:
        """An address of this network."""
        return f"{self.prefix}.{last}"

    def unit(self, number: int) -> str:
        """A unit's address."""
        return self.address(UNIT + number)

    def inside(self, number: int) -> list[str]:
        """What to put before a command so that it runs in a unit's namespace."""
        return ["nsenter", f"--net=/run/netns/{self._name(number)}"]

    def open(self) -> None:
        """Make it. Raises CalledProcessError."""
        _run("ip", "link", "add", self.bridge, "type", "bridge")
        for last in (HUB, ETCD, ETCD + 1, ETCD + 2):
            _run("ip", "addr", "add", f"{self.address(last)}/24", "dev", self.bridge)
        _run("ip", "link", "set", self.bridge, "up")
        for i in range(self.units):
            name, port = self._name(i), self._port(i)
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "link", "set", port, "master", self.bridge, "up")
            _run("ip", "-n", name, "addr", "add", f"{self.unit(i)}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("tc", "qdisc", "add", "dev", port, "clsact")

    def apply(self, number: int, *, cut: Iterable[str] = (), loss: float = 0.0, kbit: int = 0) -> None:
        """Disturb one unit's link, both ways, until :meth:`mend`.

        Args:
            cut: addresses that it neither reaches nor hears. loss: share of packets lost. kbit: per second; 0 for no limit.
        """
        name, port, gone = self._name(number), self._port(number), list(cut)
        for hook, field in (("ingress", 30), ("egress", 26)):
            code = program(gone, loss, field)
            _run("tc", "filter", "replace", "dev", port, hook, "prio", "1", "handle", "1", "protocol", "all", "bpf", "da", "bytecode", code)
        if kbit:
            limit = ("root", "tbf", "rate", f"{kbit}kbit", "burst", "32kb", "latency", "400ms")
            _run("tc", "qdisc", "replace", "dev", port, *limit)
            _run("tc", "-n", name, "qdisc", "replace", "dev", "eth0", *limit)

    def mend(self, number: int) -> None:
        """Everything passes again."""
        for hook in ("ingress", "egress"):
            _run("tc", "filter", "del", "dev", self._port(number), hook, check=False)
        _run("tc", "qdisc", "del", "dev", self._port(number), "root", check=False)
        _run("tc", "-n", self._name(number), "qdisc", "del", "dev", "eth0", "root", check=False)

    def close(self) -> None:
        """Remove it; whatever is not there is no error."""
        for i in range(self.units):
            _run("ip", "link", "del", self._port(i), check=False)
            _run("ip", "netns", "del", self._name(i), check=False)
        _run("ip", "link", "del", self.bridge, check=False)

    def _name(self, number: int) -> str:
        return f"ftc-{self.tag}-{number}"

    def _port(self, number: int) -> str:
        return f"fv{self.tag}{number}"
