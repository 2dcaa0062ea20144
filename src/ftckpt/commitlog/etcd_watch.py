"""A subscription to changes of some keys on etcd; says that something changed, never what (the tail is read anew).

A stream begins at the present, and the watching thread reads the tail only after it has begun: so there is no revision to
remember, none that a compaction could have taken away, and after any break nothing is missed. A stream is ended and begun
again every few seconds, which is also the periodic look at the tail.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

from ftckpt.commitlog.etcd_client import Connection, Metadata, Stubs
from ftckpt.commitlog.etcd_errors import FOREIGN, Fault, classify, rpc, translate
from ftckpt.commitlog.etcd_url import EtcdTarget
from ftckpt.errors import LogUnreachable

LOOK_ANYWAY = 10.0  # seconds after which a stream is begun anew


class EtcdChanges:
    """See :class:`ftckpt.commitlog.keyvalue.Changes`. Has a connection of its own.

    Args:
        target: where etcd is.
        start: first key.
        end: past the last key.
    """

    def __init__(self, target: EtcdTarget, start: str, end: str) -> None:
        self._connection = Connection(target)
        self._request = rpc.WatchRequest(create_request=rpc.WatchCreateRequest(key=start.encode(), range_end=end.encode()))
        self._lock = threading.Lock()
        self._interrupted = False
        self._stream: Any = None
        self._endpoint: Any = None
        self._requests: queue.SimpleQueue[Any] | None = None

    def subscribe(self) -> None:
        """See :class:`ftckpt.commitlog.keyvalue.Changes`."""
        self._end()
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        requests.put(self._request)

        def send(stubs: Stubs, seconds: float, metadata: Metadata) -> Any:
            return stubs.watch.Watch(iter(requests.get, None), seconds, metadata=metadata)

        with self._lock:
            if self._interrupted:
                return
            self._requests = requests
            self._endpoint, self._stream = self._connection.stream("watching", send, LOOK_ANYWAY)
        try:
            answer = next(self._stream)
        except StopIteration as ended:
            raise LogUnreachable(f"watching {self._connection.target.url}: etcd ended the stream") from ended
        except FOREIGN as error:
            self._connection.failed(self._endpoint, classify(error))
            raise translate(error, f"watching {self._connection.target.url}", "read") from error
        if answer.canceled:
            raise LogUnreachable(f"watching {self._connection.target.url}: {answer.cancel_reason or 'refused'}")

    def wait(self) -> bool:
        """See :class:`ftckpt.commitlog.keyvalue.Changes`."""
        if self._stream is None:
            return False
        try:
            return not next(self._stream).canceled
        except StopIteration:
            return False
        except FOREIGN as error:
            # The stream's own end after LOOK_ANYWAY is not the endpoint's fault; a dead endpoint shows when it is begun anew.
            if classify(error) is not Fault.UNCLEAR:
                self._connection.failed(self._endpoint, classify(error))
            return False

    def interrupt(self) -> None:
        """See :class:`ftckpt.commitlog.keyvalue.Changes`."""
        self._interrupted = True
        with self._lock:
            if self._stream is not None:
                self._stream.cancel()

    def close(self) -> None:
        """See :class:`ftckpt.commitlog.keyvalue.Changes`."""
        self._end()
        self._connection.close()

    def _end(self) -> None:
        with self._lock:
            if self._stream is not None:
                self._stream.cancel()
            if self._requests is not None:
                self._requests.put(None)  # ends gRPC's thread that reads from it
            self._stream = self._requests = None
