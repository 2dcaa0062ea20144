"""The trainer's end of the link: finds or starts this rank's agent, hands it captured bytes, learns what became of them.

Torch-free. Must not decide what is saved, nor touch the store or the log: that is the agent's work.

Signatures (all durations are seconds; every call ends within its timeout or ``config.send_timeout_s``)::

    AgentClient.open(config: AgentConfig, *, on_warning: Callable[[Warned], None] | None = None) -> AgentClient

    # state, kept up to date by the thread "ftckpt-link"
    .config .url(str) .agent_pid(int) .reattached(bool) .log_uuid(str) .alive(bool)
    .tail: Entry | None          newest entry known (rank 0 watches the log; other ranks learn of their own commits only)
    .stray: str | None           reason, once the tail was found not to be on this trajectory
    .arena: Arena | None         the arena attached last

    # slots: FREE -> (acquire) CAPTURING -> (save/publish) HELD -> FREE
    .attach(arena: Arena) -> int                                  the arena's number; its slots are all free
    .acquire_slot(timeout: float) -> int | None                   None: none became free in time
    .release_slot(slot: int) -> None                              give back an acquired slot that was not used
    .layout(table: TensorTable, states: dict[str, StateInfo]) -> int      once per change of layout

    # work
    .save(*, slot, layout, attempt, trajectory, leaves=b"", cursor=b"", expected=(), counts={}, samples=0,
          batches_committed=0, known_tail=-1, base=-1, metrics={}) -> SaveHandle
    .publish(snapshot: str, *, slot, layout, trajectory, leaves=b"", extra=b"") -> None     a slot may be saved and published
    .retire(snapshot: str) -> None
    .cursor_at(step: int, trajectory: str, cursor: bytes) -> None
    .draw(ordinal: int, state: bytes) -> None
    .recall(count: int, timeout: float) -> tuple[int, bytes] | None       newest journal entry with ordinal <= count
    .live(state: str, trajectory: Trajectory, detail: dict = {}) -> None
          detail["agents"]: URLs of all ranks' agents in rank order, separated by blanks (rank 0 announces them for the group)
    .note(kind: str, text: str, detail: dict = {}) -> None

    # ends
    .drain(timeout: float) -> int                                 nothing in flight any more; number of failed saves
    .raise_pending() -> None                                      raises a kept background failure, each once
    .reopen() -> AgentClient                                      after the agent's death (arena and layouts carried over)
    .close(timeout: float = 5.0) -> None                          says Bye; never raises for a dead agent

    SaveHandle: .ordinal .step .attempt .location .entry(Entry | None) .error(FtckptError | None) .reason(str)
                .state: "captured" | "persisted" | "committed" | "dropped" | "failed"
                .wait(timeout: float, until: "persisted" | "committed" = "committed") -> str (the state)
                    raises DeadlineExceeded, or the save's error; a dropped save returns "dropped"

Errors of a dead or silent agent are ``AgentError``.
"""

from __future__ import annotations

from ftckpt.link.config import AgentConfig

__all__ = ["AgentConfig"]
