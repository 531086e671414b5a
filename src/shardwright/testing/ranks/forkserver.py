"""A server process that has imported torch once and forks rank processes on request.

The fork server of `multiprocessing` imports the caller's main script again in its children, which breaks scripts,
notebooks and doctests.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import final

__all__ = ["ForkServer", "main"]


@final
class ForkServer:
    """The client: forks rank processes and collects their exit codes. `folder` is removed after the last of them."""

    def __init__(self, folder: Path) -> None:
        self._control, child_end = socket.socketpair()
        # One thread per rank, loopback only: all ranks run on this machine.
        environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | dict(os.environ)
        if sys.platform != "linux":
            environment.pop("GLOO_SOCKET_IFNAME")
        with child_end:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import main; main({child_end.fileno()}, {str(folder)!r})"],
                pass_fds=[child_end.fileno()],
                env=environment,
            )
        self._answers = self._control.makefile("r")
        self._exits: dict[int, int] = {}

    def fork(self) -> tuple[int, socket.socket]:
        """Fork a rank process; return its pid and a connection to it."""
        parent_end, child_end = socket.socketpair()
        with child_end:
            socket.send_fds(self._control, [b"f"], [child_end.fileno()])
        while True:
            reply = self._read()
            if "pid" in reply:
                return reply["pid"], parent_end

    def exit_code(self, pid: int) -> int:
        """Wait for a rank process to exit and return its exit code; negative for a signal, as in `subprocess`."""
        while pid not in self._exits:
            self._read()
        return self._exits.pop(pid)

    def close(self) -> None:
        """End the server and every process it has forked."""
        self._answers.close()
        self._control.close()
        self._process.wait()

    def _read(self) -> dict[str, int]:
        line = self._answers.readline()
        if not line:
            raise EOFError(f"the fork server has exited with code {self._process.poll()}")
        message: dict[str, int] = json.loads(line)
        if "ended" in message:
            self._exits[message["ended"]] = message["exitcode"]
        return message


def main(descriptor: int, folder: str) -> None:
    """Fork on request until the caller exits or dies; then end the children and remove the folder."""
    from shardwright.testing.ranks import worker

    control = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles Ctrl-C, and then closes the connection
    wake_read, wake_write = socket.socketpair()
    wake_write.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write.fileno())
    children: set[int] = set()
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    selector.register(wake_read, selectors.EVENT_READ)
    while True:
        ready = {key.fileobj for key, _ in selector.select()}
        if wake_read in ready:
            wake_read.recv(4096)
            _report_exits(control, children)
        if control in ready:
            request, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not request:
                break
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for sock in (control, wake_read, wake_write):
                    sock.close()
                worker.serve(descriptors[0])
                os._exit(0)
            os.close(descriptors[0])
            children.add(pid)
            control.sendall(json.dumps({"pid": pid}).encode() + b"\n")
    _end(children)
    shutil.rmtree(folder)


def _report_exits(control: socket.socket, children: set[int]) -> None:
    for pid in list(children):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            children.discard(pid)
            exit_code = os.waitstatus_to_exitcode(status)
            with suppress(OSError):  # the caller has exited
                control.sendall(json.dumps({"ended": pid, "exitcode": exit_code}).encode() + b"\n")


def _end(children: set[int]) -> None:
    # Idle ranks see their connection close and exit; a rank stuck in a collective does not.
    deadline = time.monotonic() + 1.0
    while children and time.monotonic() < deadline:
        for pid in list(children):
            if os.waitpid(pid, os.WNOHANG)[0]:
                children.discard(pid)
        time.sleep(0.005)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
