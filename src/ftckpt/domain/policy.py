"""When to save: small values that compose with ``|``. Pure."""

from __future__ import annotations

import msgspec

from ftckpt.errors import ConfigError


class Moment(msgspec.Struct, frozen=True):
    """What a policy may look at: the committed step, steps since the last save, and whether training ends here."""

    step: int
    since_save: int
    ending: bool = False


class Policy(msgspec.Struct, frozen=True):
    """Base of save policies."""

    def due(self, at: Moment) -> bool:
        """Whether a save is due at this moment."""
        raise NotImplementedError

    def __or__(self, other: Policy) -> Policy:
        return AnyOf((self, other))


class Every(Policy, frozen=True):
    """Every ``steps`` committed steps (multiples of it, so that all replicas agree without talking)."""

    steps: int

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or self.steps < 1:
            raise ConfigError(f"Every(steps={self.steps}) is not possible", todo="use steps >= 1")

    def due(self, at: Moment) -> bool:
        return at.step > 0 and at.step % self.steps == 0 and at.since_save > 0


class AtSteps(Policy, frozen=True):
    """At listed steps."""

    steps: tuple[int, ...]

    def due(self, at: Moment) -> bool:
        return at.step in self.steps and at.since_save > 0


class AtEnd(Policy, frozen=True):
    """Once more when training ends, if anything was committed since the last save."""

    def due(self, at: Moment) -> bool:
        return at.ending and at.step > 0 and at.since_save > 0


class Never(Policy, frozen=True):
    """No persistent saves (cursors and healing go on)."""

    def due(self, at: Moment) -> bool:
        return False


class AnyOf(Policy, frozen=True):
    """Whenever one of several policies says so."""

    policies: tuple[Policy, ...]

    def due(self, at: Moment) -> bool:
        return any(p.due(at) for p in self.policies)
