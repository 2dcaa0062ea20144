"""What to keep: small values that compose with ``|``, and their short text form. Pure; they look at one trajectory and delete nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from ftckpt.domain.ledger import Entry
from ftckpt.errors import ConfigError

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_FORMS = "last:3, every:1000, steps:500;900, best:loss:min, best:acc:max:2, younger:7d, separated by commas; a number alone is last:N; all keeps all"


class Keep(msgspec.Struct, frozen=True):
    """Base of the rules. ``a | b`` keeps what either keeps."""

    def chosen(self, path: Sequence[Entry], now: float | None) -> dict[int, str]:
        """Which generations the rule keeps.

        Args:
            path: sound generations on the tail's trajectory, newest first.
            now: seconds since the epoch; None where nobody looked at a clock.

        Returns:
            The reason by index.
        """
        raise NotImplementedError

    def __or__(self, other: Keep) -> Keep:
        return AnyKeep((*self.parts, *other.parts))

    @property
    def parts(self) -> tuple[Keep, ...]:
        """The rules that it is made of."""
        return (self,)


class KeepLast(Keep, frozen=True):
    """Keep the newest ``count`` sound generations along the tail's trajectory; ``None`` keeps all.

    Raises:
        ConfigError: ``count`` is below 1 (0 would delete what was just committed).
    """

    count: int | None = None

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise ConfigError(
                f"keep={self.count} is not possible",
                now="nothing was deleted",
                todo="use keep >= 1, or keep=None to keep every generation",
            )

    def chosen(self, path: Sequence[Entry], now: float | None) -> dict[int, str]:
        why = "everything is kept" if self.count is None else f"one of the newest {self.count}"
        return {e.index: why for e in path[: self.count]}

    def __str__(self) -> str:
        return "all" if self.count is None else f"last:{self.count}"


class KeepEvery(Keep, frozen=True):
    """Keep the first generation at or after each multiple of ``steps`` committed steps.

    Raises:
        ConfigError: ``steps`` is below 1.
    """

    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"keep every:{self.steps} is not possible", now="nothing was deleted", todo="use every:N with N >= 1")

    def chosen(self, path: Sequence[Entry], now: float | None) -> dict[int, str]:
        first = {e.step // self.steps: e for e in path}  # newest first: the oldest of a span stays
        return {e.index: f"first from step {span * self.steps} on (every {self.steps})" for span, e in first.items() if span > 0}

    def __str__(self) -> str:
        return f"every:{self.steps}"


class KeepSteps(Keep, frozen=True):
    """Keep the generations of listed steps for ever."""

    steps: tuple[int, ...]

    def chosen(self, path: Sequence[Entry], now: float | None) -> dict[int, str]:
        return {e.index: f"step {e.step} is listed" for e in path if e.step in self.steps}

    def __str__(self) -> str:
        return "steps:" + ";".join(map(str, self.steps))


class KeepBest(Keep, frozen=True):
    """Keep the ``count`` best by a metric that was recorded with the save; of equal ones the newer. NaN and no value never count.

    Raises:
        ConfigError: no metric, a mode other than "min" and "max", or ``count`` below 1.
    """

    metric: str
    mode: str = "min"
    count: int = 1

    def __post_init__(self) -> None:
        if not self.metric or self.mode not in ("min", "max") or self.count < 1 or set(self.metric) & set(",:"):
            raise ConfigError(
                f"keep {self} is not possible", now="nothing was deleted", todo="use best:METRIC:min or best:METRIC:max:N with N >= 1"
            )

    def chosen(self, path: Sequence[Entry], now: float | None) -> dict[int, str]:
        sign = 1.0 if self.mode == "min" else -1.0
        rated = [(sign * e.metrics[self.metric], e) for e in path if self.metric in e.metrics]
        best = sorted((r for r in rated if r[0] == r[0]), key=lambda r: r[0])[: self.count]
        return {e.index: f"{self.metric}={e.metrics[self.metric]:g} is among the best {self.count} ({self.mode})" for _, e in best}

    def __str__(self) -> str:
        return f"best:{self.metric}:{self.mode}" + (f":{self.count}" if self.count != 1 else "")


class KeepYounger(Keep, frozen=True):
    """Keep what was written less than ``seconds`` ago, by the time in its record. A wrong clock can only cut this rule short.

    Raises:
        ConfigError: ``seconds`` is not positive; or ``chosen`` is called without ``now``.
    """

    seconds: float

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ConfigError(
                f"keep younger:{self.seconds:g}s is not possible", now="nothing was deleted", todo="use younger:7d or the like"
            )

    def chosen(self, path: Sequence[Entry], now: float | None) -> dict[int, str]:
        if now is None:
            raise ConfigError("keep younger: the time of now is not known", now="nothing was deleted", todo="hand the time in")
        return {e.index: f"younger than {self.seconds:g} s" for e in path if e.time > now - self.seconds}

    def __str__(self) -> str:
        return f"younger:{self.seconds:g}s"


class AnyKeep(Keep, frozen=True):
    """Keep what any of several rules keeps."""

    rules: tuple[Keep, ...]

    def chosen(self, path: Sequence[Entry], now: float | None) -> dict[int, str]:
        found: dict[int, str] = {}
        for rule in self.rules:
            for index, why in rule.chosen(path, now).items():
                found.setdefault(index, why)
        return found

    @property
    def parts(self) -> tuple[Keep, ...]:
        return self.rules

    def __str__(self) -> str:
        return ",".join(map(str, self.rules))


def parse_keep(text: str | int | None) -> Keep:
    """Read the short form of a policy: ``3``, ``all``, ``last:3,every:1000,best:loss:min``.

    Raises:
        ConfigError: it cannot be read, or a rule is not possible.
    """
    if text is None or isinstance(text, int):
        return KeepLast(text)
    words = [word.strip() for word in text.split(",")]
    try:
        rules = [_rule(word) for word in words]
    except (ValueError, TypeError, KeyError, IndexError) as e:
        raise ConfigError(f"keep={text!r} cannot be read", now="nothing was deleted", todo=f"write {_FORMS}") from e
    return rules[0] if len(rules) == 1 else AnyKeep(tuple(part for rule in rules for part in rule.parts))


def _rule(word: str) -> Keep:
    name, *values = word.split(":")
    if name.lower() in ("all", "none") and not values:
        return KeepLast(None)
    if not values:
        return KeepLast(int(name))
    return _RULES[name](values)


def _best(values: list[str]) -> Keep:
    metric, mode, count = (*values, "min", "1")[:3] if len(values) == 1 else (*values, "1")[:3]
    if len(values) > 3:
        raise ValueError(values)
    return KeepBest(metric, mode, int(count))


def _seconds(text: str) -> float:
    return float(text[:-1]) * _UNITS[text[-1]] if text[-1] in _UNITS else float(text)


def _one(make: Callable[[str], Keep]) -> Callable[[list[str]], Keep]:
    def read(values: list[str]) -> Keep:
        (value,) = values
        return make(value)

    return read


_RULES: dict[str, Callable[[list[str]], Keep]] = {
    "last": _one(lambda v: KeepLast(int(v))),
    "every": _one(lambda v: KeepEvery(int(v))),
    "steps": _one(lambda v: KeepSteps(tuple(sorted({int(s) for s in v.split(";")})))),
    "younger": _one(lambda v: KeepYounger(_seconds(v))),
    "best": _best,
}
