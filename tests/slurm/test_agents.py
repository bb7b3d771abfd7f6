"""A service that plays samples on a node of its own: it is reached over TLS, shows its token to nobody else, and asks the policy at its node's address."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from hpcrl.rundir.layout import Run
from tests.jobs.small_run import HPCRL, SMALL, curve, kill, logs_of, pid_of, wait_for
from tests.paths import CONFIGS, QUICKSTART
from tests.slurm.conftest import DevCluster
from tests.slurm.test_runs import SITE, ask, finish

AGENTS, REPLICA = "10.77.0.14", "10.77.0.12"
TOKEN, STEPS = "a token of the agents", 4
ENGINE, SERVICE = "generator.inference_engine", "environment.skyrl_gym.agent.service"
LISTENS = "0A"  # as /proc writes it


def make_certificate(folder: Path) -> tuple[Path, Path]:
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=agents",
         "-addext", f"subjectAltName=IP:{AGENTS}", "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return certificate, key


def listening(pid: int, port: int) -> set[str]:
    """Return the addresses at which anybody listens at a port, on the node of a process."""
    found = set[str]()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        address, at = line.split()[1].split(":")
        if line.split()[3] == LISTENS and int(at, 16) == port:
            found.add(socket.inet_ntoa(struct.pack("=I", int(address, 16))))
    return found


@pytest.mark.faults_slow
def test_a_service_on_another_node_plays(cluster: DevCluster, tmp_path: Path) -> None:
    """Also after the worker that it asks was killed in the middle of its samples, and another one has taken its place."""
    pytest.importorskip("openai")
    rows, token, notes = tmp_path / "rows.jsonl", tmp_path / "agents.token", tmp_path / "notes.jsonl"
    read = pq.read_table(CONFIGS / "quickstart" / "data" / "train.parquet").drop(["env_class"]).to_pylist()
    rows.write_text("".join(json.dumps(row) + "\n" for row in read[:64]))
    token.touch(0o600)
    token.write_text(TOKEN)
    certificate, key = make_certificate(tmp_path)
    program = [sys.executable, Path(__file__).with_name("agents_elsewhere.py"), AGENTS, certificate, key, token, notes]
    on_n4 = cluster.argv("run", "srun", "-w", "n4", "-n1", "-t10", *map(str, program))
    with subprocess.Popen(on_n4, stdout=subprocess.PIPE, text=True) as service:
        try:
            assert service.stdout
            url = service.stdout.readline().strip()
            assert url.startswith(f"https://{AGENTS}:")
            setup = ["export HF_HUB_OFFLINE=1", f"export SSL_CERT_FILE={certificate}"]
            settings = [
                *("trainer.run_name=agents", *SMALL, f"trainer.max_steps={STEPS}", "trainer.eval_interval=0"),
                *(f"data.train_data={json.dumps([str(rows)])}", "data.val_data=[]", "environment.env_class=agent"),
                *(f"{SERVICE}.url={url}", f"{SERVICE}.token_file={token}", f"slurm.setup={json.dumps(setup)}"),
                *(f"{ENGINE}.enable_http_endpoint=true", f"{ENGINE}.http_endpoint_host=node"),
            ]
            done = cluster.run([HPCRL, "submit", str(QUICKSTART), SITE, *settings], cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            run = Run.open(tmp_path / "runs" / "quickstart" / "agents")
            wait_for(notes.exists, lambda: logs_of(run) + ask(cluster, tmp_path, "status"), 600)
            first = json.loads(notes.read_text().splitlines()[0])
            host, port = first["base_url"].removeprefix("http://").removesuffix("/v1").split(":")
            assert listening(pid_of(run, "rollout"), int(port)) == {host} == {REPLICA}
            wait_for(run.batch(2).exists, lambda: logs_of(run), 600)
            kill(pid_of(run, "rollout"))  # and the endpoint with it
            wait_for(
                lambda: len(curve(run, "policy/grad_norm")) == STEPS,
                lambda: logs_of(run) + ask(cluster, tmp_path, "status"),
                600,
            )
        finally:
            cluster.run(["scancel", "-w", "n4"])
            service.wait(60)
    assert finish(cluster, tmp_path, run, 1) == "done", logs_of(run)
    asked = [json.loads(line) for line in notes.read_text().splitlines()]
    assert len(asked) >= STEPS * 8 * 4
    assert len({one["base_url"] for one in asked}) == 2, "of the worker that was killed, and of the one in its place"
    assert all(one["refuses_others"] for one in asked)
    assert len({one["api_key"] for one in asked}) == len(asked), "a key for each sample"
    assert set(curve(run, "generate/failed_samples").values()) <= {0.0}
    assert list(curve(run, "environment/letters_in_place")) == list(range(1, STEPS + 1))
    secrets = [TOKEN.encode(), *(one["api_key"].encode() for one in asked)]
    written = [path.read_bytes() for path in run.path.rglob("*") if path.is_file() and "code" not in path.parts]
    assert not [secret for secret in secrets for text in written if secret in text]
