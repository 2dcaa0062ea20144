"""What ``ftckpt resume ... -- CMD`` hands on to the processes it starts, and whether it still applies. Pure but for encoding.

A restarting worker reads the same environment hours later: it must take the newest then. So a token counts only as long
as the log is where it was when the token was made, or has gone on by nothing but this very request's ``open``.
"""

from __future__ import annotations

import secrets

import msgspec

from ftckpt.domain.choice import AtLocation, Choice, Fresh, Newest, Request
from ftckpt.domain.ledger import Entry
from ftckpt.errors import ConfigError


class ResumeToken(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a user.

    Args:
        job: the job that it is for.
        request: eight hex digits; also the ``attempt`` of the ``open`` entry that this request appends.
        tail: index of the newest entry when the choice was made (-1: empty log).
        index: the chosen generation in the log (-1: none).
        location: its directory (empty: none).
        fresh: whether the user told to start from zero.
    """

    version: int = 1
    job: str
    request: str
    tail: int
    index: int = -1
    location: str = ""
    fresh: bool = False

    def encode(self) -> str:
        """For the environment."""
        return msgspec.json.encode(self).decode()

    @property
    def wish(self) -> Request:
        """What it asks for, as the ladder takes it."""
        return Fresh() if self.fresh else AtLocation(self.location) if self.location else Newest()


def make(choice: Choice, job: str) -> ResumeToken:
    """The token of a choice."""
    return ResumeToken(
        job=job,
        request=secrets.token_hex(4),
        tail=choice.tail.index if choice.tail is not None else -1,
        index=choice.entry.index if choice.entry is not None else -1,
        location=choice.location,
        fresh=choice.source == "fresh",
    )


def read(text: str, job: str) -> ResumeToken | None:
    """Read ``FTCKPT_RESUME``.

    Returns:
        None if there is none, or it is for another job.

    Raises:
        ConfigError: it is no token.
    """
    if not text:
        return None
    try:
        token = msgspec.json.decode(text, type=ResumeToken)
    except msgspec.DecodeError as e:
        raise ConfigError(
            f"FTCKPT_RESUME is no token of this release: {e}", now="nothing was started", todo="unset it, or run ftckpt resume again"
        ) from e
    return token if token.job == job else None


def applies(token: ResumeToken, tail: Entry | None) -> bool:
    """Whether a token is still to be followed: the log has not gone on, but for the ``open`` of this same request.

    Args:
        tail: the newest entry now.
    """
    if tail is None:
        return token.tail == -1
    if tail.index == token.tail:
        return True
    return tail.index == token.tail + 1 and tail.kind == "open" and tail.attempt == token.request


def request(text: str, job: str, tail: Entry | None) -> tuple[Request, ResumeToken | None]:
    """What a starting process shall ask the ladder for.

    Args:
        text: ``FTCKPT_RESUME``, empty if not set.
        tail: the newest entry now.

    Returns:
        The request, and the token it comes from; the newest and None when there is none or it applies no more. When the
        token's ``open`` is the tail already, the newest is what it asks for.
    """
    token = read(text, job)
    if token is None or not applies(token, tail):
        return Newest(), None
    if tail is not None and tail.index != token.tail:
        return Newest(), token
    return token.wish, token
