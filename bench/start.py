"""From typing `potluck up` to the first token, with the model on disk. Limit: 8 s.

python bench/start.py [--rounds N] [--json]
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

POTLUCK = Path(sys.executable).with_name("potluck")
LIMIT_S = 8.0


def round_trip(data_dir: Path) -> dict[str, float]:
    """Seconds from the command to its announcement, and to the first token of an answer."""
    begun = time.perf_counter()
    up = subprocess.Popen(
        [POTLUCK, "up", "--json", "--data-dir", data_dir, "--port", "0"],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        pool = json.loads(up.stdout.readline())
        announced_s = time.perf_counter() - begun
        body = {
            "model": "smollm2-135m-instruct", "stream": True, "max_tokens": 4,
            "messages": [{"role": "user", "content": "Hello"}],
        }  # fmt: skip
        headers = {"authorization": f"Bearer {pool['api_key']}"}
        with httpx.stream(
            "POST", pool["url"] + "/v1/chat/completions", json=body, headers=headers, timeout=60
        ) as answer:
            for line in answer.iter_lines():
                if '"content"' in line:
                    break
        return {"announced_s": announced_s, "first_token_s": time.perf_counter() - begun}
    finally:
        up.send_signal(signal.SIGTERM)
        up.wait()


def run(rounds: int = 3) -> dict[str, float]:
    """`fresh`: a new folder each time. `again`: a folder that was used before."""
    fresh, again = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            fresh.append(round_trip(Path(folder)))
            again.append(round_trip(Path(folder)))
    found = {
        f"{name}_{key}": statistics.median(one[key] for one in rows)
        for name, rows in (("fresh", fresh), ("again", again))
        for key in ("announced_s", "first_token_s")
    }
    return found | {"limit_s": LIMIT_S, "worst_s": max(one["first_token_s"] for one in fresh)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = run(arguments.rounds)
    if arguments.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:22} {value:6.2f} s")


if __name__ == "__main__":
    main()
