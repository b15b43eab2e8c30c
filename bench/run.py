"""All benchmarks, one after the other, each with its peer and its limit.

    python bench/run.py [NAME ...]

Results that are worth keeping go to bench/RESULTS.md, with the command that repeats them.
"""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
BENCHES = {
    "ledger": ["ledger.py"],
    "start": ["start.py"],
    "stream": ["stream.py"],
    "agent_idle": ["agent_idle.py"],
    "gateway": ["gateway.py"],
}


def main() -> None:
    wanted = sys.argv[1:] or list(BENCHES)
    unknown = [name for name in wanted if name not in BENCHES]
    if unknown:
        sys.exit(f"no such benchmark: {', '.join(unknown)}; known: {', '.join(BENCHES)}")
    for name in wanted:
        print(f"\n== {name}", flush=True)
        script, *options = BENCHES[name]
        subprocess.run([sys.executable, HERE / script, *options], check=True)


if __name__ == "__main__":
    main()
