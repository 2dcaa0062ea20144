"""Makes torchrun's handler from its parameters, and keeps it going where torch's own would end the job; speaks no etcd itself."""

from __future__ import annotations

import logging
from datetime import timedelta
from urllib.parse import quote

from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from ftckpt.commitlog.etcd_keys import EtcdKeys
from ftckpt.commitlog.etcd_url import EtcdTarget, parse_url
from ftckpt.elastic.backend import EtcdV3RendezvousBackend
from ftckpt.elastic.store import EtcdV3Store
from ftckpt.errors import ConfigError

_logger = logging.getLogger(__name__)


class EtcdV3RendezvousHandler(DynamicRendezvousHandler):
    """torch's dynamic rendezvous on etcd v3, with what was seen to go wrong in it put right.

    Each round gets a new TCPStore for the workers: the one of the round before still holds what its workers wrote, and the nodes
    that join later do not learn its address. While etcd is away, running workers go on. A closed rendezvous is forgotten
    after some seconds, so that the next run of the same id starts.
    """

    _etcd: EtcdV3RendezvousBackend
    _closed_ttl: float

    def serve(self, backend: EtcdV3RendezvousBackend, closed_ttl: float) -> EtcdV3RendezvousHandler:
        """Set what :meth:`from_backend` has no place for; itself."""
        self._etcd, self._closed_ttl = backend, closed_ttl
        return self

    def next_rendezvous(self) -> RendezvousInfo:
        """See base class."""
        self._shared_tcp_store_server = None
        self._bootstrap_store_info = None
        with self._etcd.patient():
            return super().next_rendezvous()

    def num_nodes_waiting(self) -> int:
        """See base class; nobody, while etcd does not answer."""
        try:
            return super().num_nodes_waiting()
        except RendezvousConnectionError as error:
            _logger.warning("nodes that wait to join cannot be seen, workers go on: %s", error)
            return 0

    def is_closed(self) -> bool:
        """See base class; not closed, while etcd does not answer."""
        try:
            return super().is_closed()
        except RendezvousConnectionError as error:
            _logger.warning("whether the rendezvous is closed cannot be seen, workers go on: %s", error)
            return False

    def shutdown(self) -> bool:
        """See base class."""
        with self._etcd.patient():
            closed_before = self.is_closed()
            done = super().shutdown()
        if done and not closed_before:  # else its time runs already, and starts that come too early must not lengthen it
            try:
                self._etcd.let_go(self._closed_ttl)
            except RendezvousConnectionError as error:
                _logger.warning("the closed rendezvous stays for its full time: %s", error)
        return done


def create_etcd_v3_handler(params: RendezvousParameters) -> EtcdV3RendezvousHandler:
    """A handler for ``torchrun --rdzv-backend=etcd-v3``.

    ``--rdzv-endpoint`` is ``host:port``, several of them with commas, or a whole ``etcd://`` URL. ``--rdzv-conf`` may set, besides
    torch's ``join_timeout``, ``last_call_timeout``, ``close_timeout``, ``heartbeat_timeout``, ``keep_alive_interval`` and
    ``keep_alive_max_attempt`` (seconds, attempts):

    - ``timeout``: seconds for a call to etcd while workers run (3).
    - ``read_timeout``: seconds for a call while joining or leaving (60).
    - ``ttl``: seconds that the state outlives its last change (7200).
    - ``closed_ttl``: seconds that a closed rendezvous is remembered (30).
    - ``protocol`` (``https`` for TLS), ``ca_cert``, ``ssl_cert``, ``ssl_cert_key``, ``user``, ``password_file``, ``prefix``.

    Raises:
        ConfigError: a setting is wrong.
    """
    target = _target(params)
    timeout = _positive(params, "timeout", 3)
    patience = _positive(params, "read_timeout", 60)
    keys = EtcdKeys(target, _positive(params, "ttl", 7200))
    root = f"{target.prefix}/ftckpt/rendezvous/v1/{quote(params.run_id, safe='')}/"
    backend = EtcdV3RendezvousBackend(keys, root + "state", timeout=timeout, patience=patience)
    handler: EtcdV3RendezvousHandler = EtcdV3RendezvousHandler.from_backend(
        params.run_id,
        EtcdV3Store(keys, root + "store/", timeout=patience),
        backend,
        params.min_nodes,
        params.max_nodes,
        params.local_addr,
        RendezvousTimeout(*(_seconds(params, f"{name}_timeout") for name in ("join", "last_call", "close", "heartbeat"))),
        keep_alive_interval=int(_positive(params, "keep_alive_interval", 5)),
        keep_alive_max_attempt=int(_positive(params, "keep_alive_max_attempt", 3)),
    )
    return handler.serve(backend, _positive(params, "closed_ttl", 30))


def _target(params: RendezvousParameters) -> EtcdTarget:
    if "://" in params.endpoint:
        return parse_url(params.endpoint)
    secure = str(params.get("protocol", "http")).lower() == "https"
    settings = {"ca": "ca_cert", "cert": "ssl_cert", "key": "ssl_cert_key", "user": "user", "password_file": "password_file"}
    query = "&".join(f"{ours}={quote(str(params.get(theirs)))}" for ours, theirs in settings.items() if params.get(theirs))
    prefix = str(params.get("prefix", "")).rstrip("/")
    return parse_url(f"{'etcds' if secure else 'etcd'}://{params.endpoint}{prefix}?{query}")


def _positive(params: RendezvousParameters, name: str, default: int) -> float:
    value = params.get_as_int(name, default)
    if value is None or value <= 0:
        raise ConfigError(f"--rdzv-conf {name}={value} must be positive", todo=f"leave it out for {default}")
    return float(value)


def _seconds(params: RendezvousParameters, name: str) -> timedelta | None:
    value = params.get_as_int(name)
    return None if value is None else timedelta(seconds=value)
