"""A pool on this machine, one question by the official OpenAI client, and the proof of its bill.

python examples/first_light.py [--once] [options of `potluck up`]
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import openai

POTLUCK = Path(sys.executable).with_name("potluck")
QUESTION = "In one or two sentences: why should neighbours share their tools?"
RECEIPT_WAIT_S = 15.0


def main() -> int:
    # Tools that this script starts write to the same output: lines must keep their order.
    sys.stdout.reconfigure(line_buffering=True)
    once = "--once" in sys.argv
    options = [argument for argument in sys.argv[1:] if argument != "--once"]
    up = subprocess.Popen(
        [POTLUCK, "up", "--json", *options],
        stdout=subprocess.PIPE,
        text=True,
        # Its own group: Ctrl-C reaches this script, which then ends the pool.
        start_new_session=True,
    )
    try:
        pool = announced(up)
        if pool is None:
            return up.wait() or 1
        answer(pool)
        if not once:
            print(f"\nThe pool stays up at {pool['url']}; Ctrl-C ends it.")
            print(f"Try: {POTLUCK} --help")
            up.wait()
    except KeyboardInterrupt:
        print()
    finally:
        if up.poll() is None:
            up.send_signal(signal.SIGTERM)
        up.wait()
    return 0


def announced(up: "subprocess.Popen[str]") -> dict | None:
    """The one line that `up --json` prints once a request would succeed."""
    line = up.stdout.readline()
    if not line:
        return None
    pool = json.loads(line)
    if "error" in pool:
        for error in (pool["error"], *pool["error"].get("more", ())):
            print(f"error: {error['message']}\nmend: {error['mend']}", file=sys.stderr)
        return None
    nodes = "1 node" if pool["nodes"] == 1 else f"{pool['nodes']} nodes"
    print(f"The pool is up at {pool['url']} with {nodes}.\n")
    return pool


def answer(pool: dict) -> None:
    client = openai.OpenAI(base_url=pool["url"] + "/v1", api_key=pool["api_key"])
    model = client.models.list().data[0].id
    print(f"> {QUESTION}\n")
    started = time.monotonic()
    raw = client.chat.completions.with_raw_response.create(
        model=model,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=96,
        temperature=0,
        stream=True,
    )
    for chunk in raw.parse():
        if chunk.choices and chunk.choices[0].delta.content:
            print(chunk.choices[0].delta.content, end="", flush=True)
    print(f"\n\n({model}, {time.monotonic() - started:.1f} s)\n")
    show_receipt(pool, raw.headers["x-potluck-receipt"])


def show_receipt(pool: dict, receipt: str) -> None:
    """Settled within a tick or two of the answer's end."""
    command = [POTLUCK, "receipt", "show", receipt, "--url", pool["url"],
               "--api-key", pool["api_key"]]  # fmt: skip
    deadline = time.monotonic() + RECEIPT_WAIT_S
    while True:
        shown = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
        if shown.returncode == 0 and json.loads(shown.stdout)["countersigned"]:
            break
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    subprocess.run(command, check=True)
    subprocess.run([POTLUCK, "receipt", "verify", "-"], input=shown.stdout, text=True, check=True)


if __name__ == "__main__":
    sys.exit(main())
