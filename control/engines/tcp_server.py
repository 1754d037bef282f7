# SPDX-License-Identifier: Apache-2.0
"""The publishing half of the tcp engine: a listening socket and one thread per connection.

A puller that stops to read blocks its own connections only. A connection that has not proved to
know a live id is a stranger: it has a few seconds and one request, and the longest waiting stranger
has to go when there are many, so that those who say nothing cannot keep others out.
"""

import collections
import contextlib
import dataclasses
import functools
import math
import secrets
import socket
import threading
import time
from collections.abc import Sequence

import jax
from absl import logging

from kvferry.control.engines.frames import (
    CHALLENGE_BYTES,
    Bytes,
    FrameError,
    Grant,
    Request,
    is_proven,
    leaves_of,
    pack_grant,
    read_request,
    send_parts,
    set_timeouts,
    tag_of,
)
from kvferry.control.engines.host_arrays import as_bytes
from kvferry.control.engines.publications import GONE, PULLED_BEFORE
from kvferry.control.thread_boundary import GuardedThread

_MAX_CONNECTIONS = 1024
_IDLE_SECONDS = 60.0
_MAX_STRANGERS = 256
_STRANGER_SECONDS = 5.0
_PAUSE_SECONDS = 0.1


@dataclasses.dataclass(eq=False)
class Publication:
    """What is published under one id.

    Attributes:
        key: The id.
        arrays: The arrays.
        until: When it expires, in seconds of the monotonic clock.
        lock: Held while the bytes are fetched from the device.
        taker: Nonce of the one pull that may have it, once there is one.
        taken: Streams that were asked for.
        sending: Connections on which it is being sent.
    """

    key: int
    arrays: Sequence[jax.Array]
    until: float
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    taker: bytes = b""
    taken: set[int] = dataclasses.field(default_factory=set)
    sending: set[socket.socket] = dataclasses.field(default_factory=set)
    _bytes: list[Bytes] | None = None

    def as_bytes(self) -> list[Bytes]:
        """Returns each array as 1-D uint8; waits until they are computed.

        Raises:
            jax.errors.JaxRuntimeError: If the computation of one has failed.
        """
        with self.lock:
            if self._bytes is None:
                for each in self.arrays:
                    each.copy_to_host_async()
                self._bytes = [as_bytes(each) for each in self.arrays]
            return self._bytes


class TcpServer:
    """Serves publications.

    Args:
        listener: A listening socket; closed with the server.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._lock = threading.Condition()
        self._publications: dict[bytes, Publication] = {}
        self._connections: set[socket.socket] = set()
        self._strangers: collections.OrderedDict[socket.socket, None] = collections.OrderedDict()
        self._looks_at = math.inf
        self._closed = False
        self._threads = [
            GuardedThread(self._accept, "kv-tcp-accept"),
            GuardedThread(self._expire, "kv-tcp-expire"),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def failure(self) -> str | None:
        """Why nothing can be pulled from here, or nothing expires; or None."""
        return next((each.failure for each in self._threads if each.failure), None)

    @property
    def num_published(self) -> int:
        """Publications that are held."""
        return len(self._publications)

    def publish(self, key: int, arrays: Sequence[jax.Array], deadline_seconds: float) -> bool:
        """Makes arrays available for one pull.

        Returns:
            False if the id is published already.
        """
        with self._lock:
            tag = tag_of(key)
            if tag in self._publications:
                return False
            until = time.monotonic() + deadline_seconds
            self._publications[tag] = Publication(key, arrays, until)
            if until < self._looks_at:
                self._lock.notify_all()
            return True

    def release(self, key: int) -> None:
        """Drops a publication and breaks off what is still being sent of it."""
        with self._lock:
            publication = self._publications.pop(tag_of(key), None)
            if publication is None:
                return
            for peer in publication.sending:
                _shut(peer)

    def close(self) -> None:
        """Drops everything and closes all connections."""
        with self._lock:
            self._closed = True
            self._publications.clear()
            self._lock.notify_all()
            _shut(self._listener)
            self._listener.close()
            for peer in (*self._connections, *self._strangers):
                _shut(peer)

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError as error:
                if self._closed:
                    return
                # No more file descriptors, say: that passes.
                logging.log_every_n_seconds(logging.WARNING, "tcp engine: accept: %s", 5, error)
                time.sleep(_PAUSE_SECONDS)
                continue
            with self._lock:
                if self._closed:
                    peer.close()
                    return
                if len(self._strangers) >= _MAX_STRANGERS:
                    oldest, _ = self._strangers.popitem(last=False)
                    _shut(oldest)
                self._strangers[peer] = None
            serve = functools.partial(self._serve, peer)
            try:
                GuardedThread(serve, "kv-tcp-serve").start()
            except RuntimeError as error:
                # No more threads: that passes, too.
                logging.log_every_n_seconds(logging.WARNING, "tcp engine: %s", 5, error)
                self._forget(peer)
                time.sleep(_PAUSE_SECONDS)

    def _serve(self, peer: socket.socket) -> None:
        try:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            set_timeouts(peer, _STRANGER_SECONDS, _STRANGER_SECONDS)
            while self._answer(peer):
                pass
        except OSError as error:
            # FrameError too: strangers and broken connections end here.
            logging.log_every_n_seconds(logging.DEBUG, "tcp connection ended: %s", 5, error)
        finally:
            self._forget(peer)

    def _forget(self, peer: socket.socket) -> None:
        with self._lock:
            self._connections.discard(peer)
            self._strangers.pop(peer, None)
        peer.close()

    def _answer(self, peer: socket.socket) -> bool:
        """Answers a request; returns whether there may be another one on the connection."""
        challenge = secrets.token_bytes(CHALLENGE_BYTES)
        peer.sendall(challenge)
        request = read_request(peer)
        if request is None:
            return False
        publication = self._take(peer, request, challenge)
        if isinstance(publication, str):
            peer.sendall(pack_grant(Grant(error=publication)))
            return peer in self._connections
        try:
            self._send(peer, request, publication)
        finally:
            with self._lock:
                publication.sending.discard(peer)
        return True

    def _take(self, peer: socket.socket, request: Request, challenge: bytes) -> Publication | str:
        """Returns the publication that a request may have, or why it may not."""
        with self._lock:
            publication = self._publications.get(request.tag)
            if publication is None:
                return GONE
            if not is_proven(request, publication.key, challenge):
                raise FrameError("a request that does not prove its id")
            if peer not in self._connections:
                if peer not in self._strangers or len(self._connections) >= _MAX_CONNECTIONS:
                    return f"there are {_MAX_CONNECTIONS} connections already"
                del self._strangers[peer]
                self._connections.add(peer)
                set_timeouts(peer, _IDLE_SECONDS, _IDLE_SECONDS)
            publication.taker = publication.taker or request.nonce
            if publication.taker != request.nonce or request.index in publication.taken:
                return PULLED_BEFORE
            publication.taken.add(request.index)
            publication.sending.add(peer)
            return publication

    def _send(self, peer: socket.socket, request: Request, publication: Publication) -> None:
        try:
            arrays = publication.as_bytes()
        except jax.errors.JaxRuntimeError as error:
            peer.sendall(pack_grant(Grant(error=f"the published arrays failed: {error}"[:4096])))
            return
        head = pack_grant(Grant(leaves=leaves_of(publication.arrays)))
        send_parts(peer, head, arrays, request.index, request.count)

    def _expire(self) -> None:
        with self._lock:
            while not self._closed:
                now = time.monotonic()
                for each in [p for p in self._publications.values() if p.until <= now]:
                    self.release(each.key)
                waits = [each.until - now for each in self._publications.values()]
                wait = max(0.05, min(waits)) if waits else None
                # Woken for nothing, it would take the processor from what is being sent.
                self._looks_at = math.inf if wait is None else now + wait
                self._lock.wait(wait)


def _shut(peer: socket.socket) -> None:
    # Wakes a thread that is blocked on the socket; the owner closes it.
    with contextlib.suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)
