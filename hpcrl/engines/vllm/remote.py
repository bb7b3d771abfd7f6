"""An external vLLM server (generator.inference_engine.remote_urls): its checks, its lease and its client.

`hpcrl engine` starts one whose versions can be proven. It works for one worker at a time, the holder of a lease. Each request shows the
lease, which ends after a minute without requests, or with the server. So no other run changes its weights unseen, and a restarted server
is not taken for the one that got the newest version.
"""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import httpx

from hpcrl.config import Config
from hpcrl.config.sections.generator import MOST_KEPT
from hpcrl.engines.vllm.address import Address
from hpcrl.engines.vllm.client import EngineClient
from hpcrl.engines.vllm.middleware import LEASE, LEASE_PATH, OWNER
from hpcrl.errors import ConfigError, EngineError
from hpcrl.network import public_address
from hpcrl.rollout.engines.base import Engine, Launched
from hpcrl.runtime.heartbeat import SuspendAwareClock
from hpcrl.runtime.token import read_secret

_POLL_S = 1.0
_ANSWER_S = 5.0
_SECTION = "generator.inference_engine"
_START = "start it with `hpcrl engine FILE.toml --key-file FILE` (docs/engines.md)"
_NOT_OURS = (
    f"it is no server of hpcrl's, so nobody can prove which version of the weights it holds: {_START}; `hpcrl eval` takes a plain one, whose "
    "weights stay as they are"
)


@dataclass(frozen=True)
class RemoteOptions:
    """Requirements of an external server.

    Attributes:
        owner: who asks it, and may take it over from an earlier process of the same name.
        key_file: has the key that it wants; None: it wants none.
        model: that it has to serve; None: any, as it gets other weights before it is asked.
        max_model_len: tokens of prompt and response together that it has to take.
        trains: whether versions are loaded, and what is generated is trained.
    """

    address: Address
    owner: str
    key_file: Path | None
    model: str | None
    max_model_len: int
    trains: bool
    keep_cache: bool = False


def remote_options(config: Config, owner: str, replica: int, *, trains: bool) -> RemoteOptions:
    engine = config.generator.inference_engine
    ca_file = Path(engine.remote_ca_file) if engine.remote_ca_file else None
    return RemoteOptions(
        address=Address(engine.remote_urls[replica].rstrip("/"), ca_file=ca_file),
        owner=owner,
        key_file=Path(engine.remote_key_file) if engine.remote_key_file else None,
        model=None if trains else config.trainer.policy.model.pretrained.path,
        max_model_len=config.max_model_len,
        trains=trains,
        keep_cache=engine.keep_cache_on_update,
    )


class Remote(Launched):
    """An external server that runs already; `stop` leaves it running for others.

    Raises:
        ConfigError: its key, its certificate or its address is none that may be used.
    """

    def __init__(self, options: RemoteOptions) -> None:
        self._options = options
        self._headers = dict[str, str]()
        if options.key_file:
            self._headers["authorization"] = f"Bearer {read_secret(options.key_file, f'{_SECTION}.remote_key_file')}"
        _check_certificates(options.address)

    def wait_ready(self, timeout_s: float, still_waiting: Callable[[], object] = lambda: None) -> None:
        clock, why = SuspendAwareClock(2 * _ANSWER_S), "it does not answer"
        with httpx.Client(**self._options.address.client(), headers=self._headers, timeout=_ANSWER_S) as http:
            while clock.now() < timeout_s:
                still_waiting()
                try:
                    check_network(self._options.address)
                    busy = self._take(http)
                    if busy is None:
                        return
                    why = busy
                except (httpx.TransportError, OSError) as error:
                    why = f"it does not answer ({error!r})"
                time.sleep(_POLL_S)
        raise self._refused(f"{why}, for {timeout_s:.0f} s ({_SECTION}.start_timeout_seconds)")

    def _take(self, http: httpx.Client) -> str | None:
        """Take the server for this process; return why it cannot be had yet, or None."""
        answer = http.post(LEASE_PATH, headers={OWNER: quote(self._options.owner, safe=" /")})
        if answer.status_code == 401:
            raise self._refused(f"it refuses the key of {_SECTION}.remote_key_file ({self._options.key_file})")
        if answer.status_code == 409:
            return answer.json()["error"]
        if answer.status_code == 200:
            facts = answer.json()
            self._headers[LEASE] = facts["lease"]
            self._check(facts)
        elif answer.status_code in (404, 405) and not self._options.trains:
            self._check(_plain_facts(http, self._refused))
        elif answer.status_code in (404, 405):
            raise self._refused(_NOT_OURS)
        else:
            return f"it answers {answer.status_code} to {LEASE_PATH}: {answer.text[:200]}"
        return None

    def _check(self, facts: Mapping[str, Any]) -> None:
        options = self._options
        if facts["max_model_len"] < options.max_model_len:
            raise self._refused(
                f"it takes {facts['max_model_len']} tokens of prompt and response together (--max-model-len), and {options.max_model_len} are "
                "needed (trainer.max_prompt_length, generator.max_input_length, max_generate_length)"
            )
        if options.model is not None and not _same_model(facts["model"], options.model):
            raise self._refused(f"it serves {facts['model']}, and {options.model} is evaluated")
        if not options.trains:
            if facts.get("weight_version", "default") != "default":
                raise self._refused(f"it holds version {facts['weight_version']} of a run, not the model; {_START}")
            return
        found = {name: facts.get(name) for name in _WANTED}
        if wrong := [
            f"{name} is {found[name]}, not {wanted}" for name, wanted in _WANTED.items() if found[name] != wanted
        ]:
            raise self._refused(f"{'; '.join(wrong)}: {_START}")

    def connect(self, *, version: int = 0, replica: str = "") -> Engine:
        options = self._options
        name = f"{replica} at {options.address.url}" if replica else options.address.url
        return RemoteClient(
            options.address, self._headers, version, replica=name, keep_cache=options.keep_cache, share=1.0
        )

    def alive(self) -> bool:
        return True  # there is no process to look at; requests fail

    def failure(self, what: str) -> EngineError:
        return self._refused(f"{what}; what it says is where it was started")

    def stop(self) -> None:
        pass

    def _refused(self, why: str) -> EngineError:
        return EngineError(f"the inference engine at {self._options.address.url} ({_SECTION}.remote_urls): {why}")


_WANTED = {"logprobs_mode": "processed_logprobs", "max_logprobs": MOST_KEPT}


class RemoteClient(EngineClient):
    """Client of such a server, which others get at once when this one has ended."""

    async def close(self) -> None:
        with suppress(EngineError):  # it is gone, or the lease ends by itself
            async with self._sent("DELETE", LEASE_PATH, timeout=aiohttp.ClientTimeout(_ANSWER_S)):
                pass
        await super().close()


def _plain_facts(http: httpx.Client, refused: Callable[[str], EngineError]) -> dict[str, Any]:
    """Return the properties that a vLLM server without hpcrl's middleware reports."""
    models = http.get("/v1/models")
    if models.status_code == 401:
        raise refused(f"it refuses the key of {_SECTION}.remote_key_file")
    if models.status_code != 200:
        raise refused(f"it is no vLLM server: it answers {models.status_code} to /v1/models")
    if http.post("/inference/v1/generate", json={}).status_code in (404, 405):
        raise refused("it takes no tokens; start it with `vllm serve MODEL --enable-scale-out`")
    (first, *_) = models.json()["data"]
    return {"model": first.get("root") or first["id"], "max_model_len": first.get("max_model_len") or 0}


def _same_model(found: str, wanted: str) -> bool:
    both = [str(Path(path).resolve()) if os.path.exists(path) else path for path in (found, wanted)]
    return both[0] == both[1]


def _check_certificates(address: Address) -> None:
    if address.ca_file is None:
        return
    try:
        ssl.create_default_context(cafile=address.ca_file)
    except OSError as error:
        raise ConfigError(
            f"{_SECTION}.remote_ca_file: expected a file of certificates in PEM, found {address.ca_file}: {error}"
        ) from error


def check_network(address: Address) -> None:
    """Raise ConfigError where the key, and all requests, would cross a public network unencrypted.

    Raises:
        ConfigError: they would.
        OSError: the name of the host cannot be resolved.
    """
    if found := public_address(address.url):
        raise ConfigError(
            f"{address.url} ({_SECTION}.remote_urls) is {found}, no address of a private network, where the key would be sent in the clear; "
            "use https (`hpcrl engine --certificate`)"
        )
