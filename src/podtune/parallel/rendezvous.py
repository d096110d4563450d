"""Waiting for all processes before jax does: jax ends a process that waits too long without saying who is missing."""

from __future__ import annotations

import socket
import time

from podtune.config.errors import RunFailure

_RETRY_SECONDS = 0.2
_GO = b"go"


def meet(host: str, port: int, *, index: int, count: int, seconds: float) -> None:
    """Returns when all `count` processes have called this; process 0 listens on the port, the others come to it.

    The port is free again afterwards. Raises RunFailure naming who is missing after so many seconds.
    """
    deadline = time.monotonic() + seconds
    if index == 0:
        _receive(host, port, count, deadline, seconds)
    else:
        _come(host, port, index, deadline, seconds)


def _receive(host: str, port: int, count: int, deadline: float, seconds: float) -> None:
    arrived: dict[int, socket.socket] = {}
    try:
        with socket.create_server(("", port)) as listener:
            while len(arrived) < count - 1:
                _accept(listener, arrived, deadline)
                if time.monotonic() > deadline:
                    missing = ", ".join(str(index) for index in range(1, count) if index not in arrived)
                    raise RunFailure(
                        f"{len(arrived) + 1} of {count} processes met at {host}:{port} within {seconds:.0f} s; "
                        f"missing: {missing}. Look at their logs, and whether they can reach this host."
                    )
        for connection in arrived.values():
            connection.sendall(_GO)
    except OSError as error:
        raise RunFailure(
            f"process 0 cannot listen on port {port} ({error}). Choose another port in PODTUNE_COORDINATOR, or end the "
            f"process that still holds it."
        ) from error
    finally:
        for connection in arrived.values():
            connection.close()


def _accept(listener: socket.socket, arrived: dict[int, socket.socket], deadline: float) -> None:
    """Takes in one process; whoever comes and says no number, such as a port scan, is sent away."""
    listener.settimeout(max(0.01, deadline - time.monotonic()))
    try:
        connection, _ = listener.accept()
    except TimeoutError:
        return
    try:
        connection.settimeout(5)
        arrived[int(connection.recv(16))] = connection
    except (OSError, ValueError):
        connection.close()


def _come(host: str, port: int, index: int, deadline: float, seconds: float) -> None:
    """Says its number and waits until process 0 has seen all."""
    problem: Exception | None = None
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic())) as connection:
                connection.sendall(str(index).encode())
                if connection.recv(len(_GO)) == _GO:
                    return
        except OSError as error:
            problem = error
        time.sleep(_RETRY_SECONDS)
    raise RunFailure(
        f"process {index} did not meet process 0 at {host}:{port} within {seconds:.0f} s ({problem}). Look at the log "
        f"of process 0, and whether this host can reach that address."
    )
