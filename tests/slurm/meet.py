"""Run by srun, one task per node: reach every node by name and by address, and the own loopback. Prints one JSON line."""

import json
import os
import socket
import sys
import threading
import time

PORT = 4567  # the same one on every node, loopback too: each has its own network


def serve(listener: socket.socket) -> None:
    while True:
        peer, _ = listener.accept()
        with peer:
            peer.sendall(socket.gethostname().encode())


def ask(host: str) -> str:
    for _ in range(100):
        try:
            with socket.create_connection((host, PORT), timeout=5) as peer:
                return peer.recv(100).decode()
        except ConnectionRefusedError:
            time.sleep(0.05)  # that node is not there yet
    return "nobody"


own = socket.gethostbyname(socket.gethostname())
for address in (own, "127.0.0.1"):
    listener = socket.create_server((address, PORT))
    threading.Thread(target=serve, args=(listener,), daemon=True).start()
everybody = [f"n{i}" for i in range(1, int(os.environ["SLURM_NNODES"]) + 1)]
told = {
    "name": socket.gethostname(),
    "address": own,
    "by_name": [ask(name) for name in everybody],
    "by_address": [ask(socket.gethostbyname(name)) for name in everybody],
    "loopback": ask("127.0.0.1"),
}
sys.stdout.write(json.dumps(told) + "\n")
sys.stdout.flush()
time.sleep(1)  # let slower nodes ask
