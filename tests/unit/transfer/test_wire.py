"""What is set up on a connected socket, by where its peer is."""

from __future__ import annotations

import socket

from ftckpt.transfer.wire import tune


def buffers(host: str) -> tuple[list[int], list[int], int]:
    """Receive and send buffer (bytes) of a connection from 127.0.0.1 to ``host`` before and after, and whether it sends at once."""
    with socket.create_server((host, 0)) as listening, socket.socket() as near:
        near.bind(("127.0.0.1", 0))
        near.connect(listening.getsockname())
        options = (socket.SO_RCVBUF, socket.SO_SNDBUF)
        before = [near.getsockopt(socket.SOL_SOCKET, o) for o in options]
        tune(near)
        return before, [near.getsockopt(socket.SOL_SOCKET, o) for o in options], near.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_small_buffers_to_a_peer_on_this_host_and_the_kernels_own_to_others() -> None:
    _, after, at_once = buffers("127.0.0.1")
    assert (after, at_once) == ([2 * (256 << 10)] * 2, 1)  # the kernel doubles what it is told, for its own records
    before, after, at_once = buffers("127.0.0.2")
    assert (after, at_once) == (before, 1)
