"""Every bounded wait, and the order that must hold between them. Pure values; nothing waits here."""

from __future__ import annotations

import msgspec

TORCHRUN_KILL_S = 30.0  # torchrun sends SIGKILL this long after SIGTERM


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """Every bounded wait, in seconds. The order that must hold between them is checked by ``Settings.validate``.

    ========================================= =========================================================
    order                                     because
    ========================================= =========================================================
    3 * log_s <= registry_ttl_s               a lease is renewed at a third of its life
    tail_poll_s <= registry_ttl_s             a moved tail is seen before a replica is called gone
    log_s < agent_start_s                     an agent reads the log before it answers
    cursors_s <= receipts_s                   cursors never delay a generation longer than its shards may
    cursors_s <= cursor_search_s              a cursor is offered as long as somebody waits for it
    slot_s < group_s                          a rank that waits for a buffer is waited for by its group
    group_s <= load_s                         ranks finish loading at times further apart than they answer
    heal_stall_s < heal_s                     a stalled source is left before the heal is given up
    step_s <= quorum_s                        a quorum outlasts a step
    step_s < heal_s                           a heal may take longer than a step
    step_s <= capture_s                       a capture's copies queue behind a step's work on the device
    term_s < 30                               torchrun kills 30 s after SIGTERM
    cursors_s + log_s <= close_s              close() outlasts the end of one save
    ========================================= =========================================================

    Args:
        log_s: one call to the commit log.
        tail_poll_s: interval of reading the log's tail besides watching it.
        registry_ttl_s: life of a replica's line in the log when it is not renewed.
        slot_s: how long ``save()`` waits for a free buffer with ``on_busy="wait"``.
        capture_s: until an accelerator has made the copies of a capture, behind all that it was given before.
        group_s: how long ranks of a group wait for each other's word.
        load_s: how long a rank that has loaded a generation waits for the others of its group to have loaded theirs.
        agent_start_s: until a started agent has answered.
        agent_send_s: until the agent has taken a message.
        receipts_s: how long a generation waits for the shards of all ranks.
        cursors_s: how long it waits for other replicas' cursors.
        cursor_search_s: how long an agent looks for the attempt that its cursor belongs to.
        commit_linger_s: how long an agent goes on trying to commit after its trainer has gone.
        linger_s: how long an idle agent stays after its trainer's death.
        gc_s: how long one clean-up by an agent may take; never longer than ``commit_linger_s``.
        term_s: how long an agent may finish work after SIGTERM.
        close_s: how long ``close()`` waits for saves in flight.
        step_s: one step's allreduce and vote (torchft's Manager timeout).
        quorum_s: one quorum.
        connect_s: reaching the lighthouse, a manager or a peer.
        heal_s: one heal, as a whole.
        heal_stall_s: without any byte from a peer, until it is left for another.
    """

    log_s: float = 5.0
    tail_poll_s: float = 2.0
    registry_ttl_s: float = 15.0
    slot_s: float = 60.0
    capture_s: float = 600.0
    group_s: float = 120.0
    load_s: float = 1800.0
    agent_start_s: float = 30.0
    agent_send_s: float = 30.0
    receipts_s: float = 600.0
    cursors_s: float = 20.0
    cursor_search_s: float = 120.0
    commit_linger_s: float = 300.0
    linger_s: float = 30.0
    gc_s: float = 60.0
    term_s: float = 25.0
    close_s: float = 600.0
    step_s: float = 60.0
    quorum_s: float = 120.0
    connect_s: float = 10.0
    heal_s: float = 600.0
    heal_stall_s: float = 10.0

    def problems(self) -> list[str]:
        """All values and orders that cannot hold, one sentence each."""
        wrong = [
            f"deadlines.{k}={v:g} must be positive"
            for k, v in msgspec.structs.asdict(self).items()
            if v < 0 or (v == 0 and k != "linger_s")
        ]
        rules = (
            (
                3 * self.log_s <= self.registry_ttl_s,
                "log_s",
                "registry_ttl_s",
                "a lease is renewed at a third of its life: registry_ttl_s >= 3 * log_s",
            ),
            (self.tail_poll_s <= self.registry_ttl_s, "tail_poll_s", "registry_ttl_s", "tail_poll_s <= registry_ttl_s"),
            (self.log_s < self.agent_start_s, "log_s", "agent_start_s", "an agent reads the log before it answers: log_s < agent_start_s"),
            (self.cursors_s <= self.receipts_s, "cursors_s", "receipts_s", "cursors_s <= receipts_s"),
            (self.cursors_s <= self.cursor_search_s, "cursors_s", "cursor_search_s", "cursors_s <= cursor_search_s"),
            (self.slot_s < self.group_s, "slot_s", "group_s", "the group waits for a rank that waits for a buffer: slot_s < group_s"),
            (self.group_s <= self.load_s, "group_s", "load_s", "ranks load at different speeds: group_s <= load_s"),
            (self.heal_stall_s < self.heal_s, "heal_stall_s", "heal_s", "heal_stall_s < heal_s"),
            (self.step_s <= self.quorum_s, "step_s", "quorum_s", "step_s <= quorum_s"),
            (self.step_s < self.heal_s, "step_s", "heal_s", "step_s < heal_s"),
            (self.step_s <= self.capture_s, "step_s", "capture_s", "copies queue behind a step's work: step_s <= capture_s"),
            (self.cursors_s + self.log_s <= self.close_s, "cursors_s", "close_s", "cursors_s + log_s <= close_s"),
        )
        wrong += [f"deadlines.{a}={getattr(self, a):g} and deadlines.{b}={getattr(self, b):g}: {why}" for ok, a, b, why in rules if not ok]
        if self.term_s >= TORCHRUN_KILL_S:
            wrong.append(f"deadlines.term_s={self.term_s:g}: torchrun kills {TORCHRUN_KILL_S:g} s after SIGTERM, so it must be less")
        return wrong
