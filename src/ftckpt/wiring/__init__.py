"""The only place where URLs become parts: stores, commit logs, an agent's configuration, and a root's owner.

It decides nothing about generations, and writes nothing but ``<root>/<job>/job.json``.
"""

from ftckpt.wiring.agents import agent_config, job_secret, read_secret
from ftckpt.wiring.logs import LOG_FILE, log_path, log_url, open_log
from ftckpt.wiring.owner import (
    MARKER,
    Marker,
    check_marker,
    check_room,
    claim_root,
    durable_tier,
    guard_log,
    jobs_in,
    read_marker,
    refuse_former,
    refuse_inside,
    remark,
    vouching,
)
from ftckpt.wiring.stores import home, open_root, open_store, root_as_url, root_path

__all__ = [
    "LOG_FILE",
    "MARKER",
    "Marker",
    "agent_config",
    "check_marker",
    "check_room",
    "claim_root",
    "durable_tier",
    "guard_log",
    "home",
    "job_secret",
    "jobs_in",
    "log_path",
    "log_url",
    "open_log",
    "open_root",
    "open_store",
    "read_marker",
    "read_secret",
    "refuse_former",
    "refuse_inside",
    "remark",
    "root_as_url",
    "root_path",
    "vouching",
]
