"""Simulators in processes of their own: one that hangs or crashes ends its sample, and nothing else.

A server is started once, which has imported the simulator, and divides itself for each one that is wanted. All of them end with the process
that has started the server, however it ends.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from hpcrl.errors import ConfigError, HpcrlError, UserCodeError
from hpcrl.types import LONGEST_FAILURE

if TYPE_CHECKING:
    from hpcrl.envs.simulators.base import Bounds, Observation

SIMULATORS = {
    "gymnasium": "hpcrl.envs.simulators.gym:Gymnasium",
    "libero": "hpcrl.envs.simulators.libero:Libero",
    "robotwin": "hpcrl.envs.simulators.robotwin:RoboTwin",
}
"""Names of environment.skyrl_gym.robot.simulator, and where each simulator is."""

_START_S = 120.0  # imports from a shared filesystem
_PR_SET_PDEATHSIG = 1


class SimulatorProcess:
    """A simulator in a process of its own.

    Args:
        connection: to the process.
        seconds: that an answer may take; 0: any time.

    Attributes:
        bounds: of its actions and states.
        broken: it takes no more calls.
    """

    def __init__(self, connection: Connection, seconds: float) -> None:
        self._connection, self._seconds, self.broken = connection, _START_S, False
        self._pidfd = os.pidfd_open(self._answer())
        try:
            self.bounds: Bounds = self._answer()
        except BaseException:
            self.kill()
            raise
        self._seconds = seconds

    def reset(self, seed: int, task: Mapping[str, Any]) -> Observation:
        """As of Simulator.

        Raises:
            UserCodeError: the simulator raised, ended, or took too long.
        """
        return self._call("reset", seed, dict(task))

    def step(self, action: Any) -> Observation:
        """As of Simulator; errors as of `reset`."""
        return self._call("step", action)

    def kill(self) -> None:
        self.broken = True
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        os.close(self._pidfd)
        self._connection.close()

    def _call(self, verb: str, *arguments: Any) -> Any:
        try:
            self._connection.send((verb, arguments))
            return self._answer()
        except TimeoutError as error:
            self.kill()
            raise UserCodeError(str(error)) from error
        except (OSError, EOFError) as error:
            self.kill()
            raise UserCodeError(
                f"the simulator's process ended ({error or 'end of file'}); see the replica's log"
            ) from error

    def _answer(self) -> Any:
        if not self._connection.poll(self._seconds or None):
            raise TimeoutError(f"the simulator took longer than {self._seconds:g} s")
        failed, value = self._connection.recv()
        if failed is not None:
            raise failed(value)
        return value


class SimulatorPool:
    """The simulators of one kind: each serves one sample after the other.

    Args:
        simulator: a name of `SIMULATORS`, or "package.module:Class" of a user's own.
        seconds: that an answer of one may take; 0: any time.
    """

    def __init__(self, simulator: str, options: Mapping[str, Any], seconds: float) -> None:
        self._simulator, self._options, self._seconds = simulator, dict(options), seconds
        self._lock, self._idle = threading.Lock(), list[SimulatorProcess]()
        self._server: socket.socket | None = None

    def take(self) -> SimulatorProcess:
        """Return a simulator that nobody uses, an old one or a new one.

        Raises:
            UserCodeError: it cannot be made.
            ConfigError: its options are wrong.
        """
        with self._lock:
            if self._idle:
                return self._idle.pop()
            connection = self._connect()
        try:
            return SimulatorProcess(connection, self._seconds)
        except (OSError, EOFError) as error:
            raise UserCodeError(
                f"simulator {self._simulator}: its process ended while it started; see the replica's log"
            ) from error

    def give_back(self, process: SimulatorProcess) -> None:
        if not process.broken:
            self._idle.append(process)

    def _connect(self) -> Connection:
        """Have the server divide for one more simulator; return what leads to it. The lock is held."""
        if self._server is None:
            self._server, theirs = socket.socketpair()
            named = SIMULATORS.get(self._simulator, self._simulator)
            command = [sys.executable, "-m", __name__, named, json.dumps(self._options), str(theirs.fileno())]
            subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
            theirs.close()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._server, [b"1"], [theirs.fileno()])
            except OSError:  # the server has ended: there is none any more, and a new one the next time
                self._server = None
        return Connection(ours.detach())


@cache
def _pool(simulator: str, options: str, seconds: float) -> SimulatorPool:
    return SimulatorPool(simulator, json.loads(options), seconds)


def pool_of(simulator: str, options: Mapping[str, Any], seconds: float) -> SimulatorPool:
    """Return the pool of this process for a simulator; arguments as of SimulatorPool."""
    return _pool(simulator, json.dumps(options, sort_keys=True), seconds)


def _serve(named: str, options: Mapping[str, Any], control: socket.socket) -> None:
    """Become a server: divide for each connection that comes, until the other end is closed."""
    # no display; Mesa's software renderer where there is no GPU
    os.environ["MUJOCO_GL"] = os.environ.get("MUJOCO_GL") or "egl"
    module, _, attribute = named.partition(":")
    failure = None
    try:
        made = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        made, failure = None, f"environment.skyrl_gym.robot.simulator: cannot import {named}: {error}"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # they are not waited for
    parent = os.getpid()
    while True:
        _, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not fds:
            return
        if os.fork() == 0:
            control.close()
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == parent:
                with suppress(EOFError, OSError):
                    _simulate(Connection(fds[0]), made, options, failure)
            os._exit(0)
        os.close(fds[0])


def _simulate(connection: Connection, made: Any, options: Mapping[str, Any], failure: str | None) -> None:
    """Answer calls to one simulator until nobody calls any more."""
    from hpcrl.envs.simulators.base import Bounds

    connection.send((None, os.getpid()))
    if failure is not None:
        connection.send((ConfigError, failure))
        connection.recv()  # it is killed by who reads this, and not before
    simulator: Any = None
    verb, arguments = "make", ()
    while True:
        try:
            if simulator is None:
                simulator = made(options)
                answer = Bounds.of(simulator)
            else:
                answer = getattr(simulator, verb)(*arguments)
        except HpcrlError as error:
            connection.send((type(error), str(error)))
        except Exception as error:  # noqa: BLE001  a user's code, whose error goes into the sample's message
            connection.send(
                (UserCodeError, f"the simulator raised {type(error).__name__}: {str(error)[:LONGEST_FAILURE]}")
            )
        else:
            connection.send((None, answer))
        verb, arguments = connection.recv()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _serve(sys.argv[1], json.loads(sys.argv[2]), socket.socket(fileno=int(sys.argv[3])))
