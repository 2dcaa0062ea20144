"""What every CommitLog must do, as checks that take a fresh job; usable by anybody who writes a log.

``CHECKS`` maps a name to a check. Each raises ``ConformanceError`` with what was expected and found. What they work on is in ``log_world``.
"""

from __future__ import annotations

from ftckpt.testing import log_order, log_presence, log_whole, log_withdrawal
from ftckpt.testing.log_world import Checks, World

__all__ = ["CHECKS", "World"]

CHECKS: Checks = {**log_order.CHECKS, **log_withdrawal.CHECKS, **log_presence.CHECKS, **log_whole.CHECKS}
