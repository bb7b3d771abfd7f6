"""An engine on several nodes: rendezvous of its processes, and its end when one part ends.

It is vLLM's own mode, without Ray: on the first node the server and the scheduler, on the others workers alone (`--headless`). They find each
other at an address of the first node. The rollout worker there chooses and writes it for each start; jobs/engine_node.py follows, as
torchrun's agents do for the trainer's ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpcrl.config import Config
from hpcrl.engines.vllm.server import EngineNode, Server, ServerOptions, server_options
from hpcrl.errors import EngineError
from hpcrl.launch.agent.network import choose_port
from hpcrl.rollout.engines.launch import EnginePlace
from hpcrl.rundir.commit import read_json, write_json
from hpcrl.rundir.layout import Run
from hpcrl.runtime.process_status import GIVEN_UP, SERVING, StatusWriter, read_process_status
from hpcrl.runtime.scratch import Scratch

_LOOK_S = 2.0
_FOLLOW_S = 1.0


@dataclass(frozen=True)
class Rendezvous:
    """The address at which the processes of one start of an engine meet.

    Attributes:
        number: of the start, of this attempt; the first is 1.
        address: of the first node.
        port, rpc_port: there, for collectives and for copies of the weights on other nodes.
    """

    number: int
    address: str
    port: int
    rpc_port: int

    def node(self, nodes: int, index: int) -> EngineNode:
        return EngineNode(nodes, index, self.address, self.port, self.rpc_port)


def start_first_node(config: Config, place: EnginePlace) -> FirstNode:
    """Start an engine on its first node, this one; its other nodes follow."""
    nodes, run, replica = config.engine_nodes, place.run, place.replica
    rendezvous = arrange(run, place.attempt, replica, os.environ["HPCRL_ADDRESS"], choose_port)
    options = replace(server_options(run, config), node=rendezvous.node(nodes, 0))
    others = range(replica * (nodes - 1), (replica + 1) * (nodes - 1))
    return FirstNode(options, place.directory, place.log, run, place.attempt, rendezvous, others)


def arrange(run: Run, attempt: int, replica: int, address: str, choose_port: Callable[[str], int]) -> Rendezvous:
    """Choose the rendezvous of the next start of an engine, write it for the other nodes, and remove those of earlier attempts."""
    for earlier in range(1, attempt):
        run.meeting(earlier, replica).unlink(missing_ok=True)
    before = read_rendezvous(run, attempt, replica)
    rendezvous = Rendezvous((before.number if before else 0) + 1, address, choose_port(address), choose_port(address))
    write_json(run.meeting(attempt, replica), asdict(rendezvous))
    return rendezvous


def read_rendezvous(run: Run, attempt: int, replica: int) -> Rendezvous | None:
    value = read_json(run.meeting(attempt, replica))
    return None if value is None else Rendezvous(**value)


def note_ended(run: Run, attempt: int, part: int, rendezvous: int) -> None:
    """Record that a part of an engine has ended, for the first node and for the process that replaces the part."""
    for earlier in range(1, attempt):
        run.part_ended(earlier, part).unlink(missing_ok=True)
    write_json(run.part_ended(attempt, part), {"meeting": rendezvous})


def last_ended(run: Run, attempt: int, part: int) -> int:
    """Return the number of the last start in which the part has ended; 0: none."""
    value: Mapping[str, Any] = read_json(run.part_ended(attempt, part)) or {}
    return value.get("meeting", 0)


def missing_node(run: Run, attempt: int, rendezvous: int, parts: Iterable[int]) -> int | None:
    """Return a part that has ended in this start of the engine, or that the agent has given up; None: all run, or may start."""
    for part in parts:
        status = read_process_status(run, f"part-{part}", attempt)
        if last_ended(run, attempt, part) == rendezvous or (status and status.state.startswith(GIVEN_UP)):
            return part
    return None


def serve_node(run: Run, config: Config, attempt: int, number: int, status: StatusWriter) -> None:
    """Start this part at each start of the engine, until the run ends or vLLM ends here."""
    nodes = config.engine_nodes
    replica, place = divmod(number, nodes - 1)
    options, log = server_options(run, config), run.log(attempt, f"engine-part-{number}")
    scratch, server, joined = Scratch("engine"), None, last_ended(run, attempt, number)
    try:
        while True:
            rendezvous = read_rendezvous(run, attempt, replica)
            if rendezvous is not None and rendezvous.number > joined:
                if server:
                    server.stop()
                joined = rendezvous.number
                server = Server(replace(options, node=rendezvous.node(nodes, place + 1)), scratch.path, log)
            elif server and not server.alive():
                raise server.failure("ended")
            status.write(f"{SERVING} rollout-{replica}" if server else f"waiting for rollout-{replica}")
            time.sleep(_FOLLOW_S)
    except EngineError:
        note_ended(run, attempt, number, joined)
        raise
    finally:
        if server:
            server.stop()
        scratch.remove()


class FirstNode(Server):
    """The server on an engine's first node, alive as long as all other parts are.

    Args:
        others: numbers of the other parts.
    """

    def __init__(
        self,
        options: ServerOptions,
        directory: Path,
        log: Path,
        run: Run,
        attempt: int,
        rendezvous: Rendezvous,
        others: range,
    ) -> None:
        self._run, self._attempt, self._meeting, self._others = run, attempt, rendezvous, others
        self._ended: int | None = None
        self._looked = 0.0
        super().__init__(options, directory, log)

    def alive(self) -> bool:
        if self._ended is None and time.monotonic() - self._looked > _LOOK_S:
            self._looked = time.monotonic()
            self._ended = missing_node(self._run, self._attempt, self._meeting.number, self._others)
        return self._ended is None and super().alive()

    def failure(self, what: str) -> EngineError:
        if self._ended is None:
            return super().failure(what)
        log = self._run.log(self._attempt, f"engine-part-{self._ended}")
        return EngineError(f"the inference engine {what}: part-{self._ended} of it is not there; its log: {log}")
