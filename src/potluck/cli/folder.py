"""The data folder of a pool on this machine: where everything lies.

Secrets lie in folders and files that only their owner can read.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class DataFolder:
    root: Path

    @property
    def settings(self) -> Path:
        return self.root / "potluck.toml"

    @property
    def founding(self) -> Path:
        return self.root / "pool.json"

    @property
    def credentials(self) -> Path:
        """The owner's API key and the gateway's address: what the CLI reads by default."""
        return self.root / "credentials.json"

    @property
    def database(self) -> Path:
        return self.root / "pool.db"

    @property
    def nats_keys(self) -> Path:
        return self.root / "nats"

    @property
    def gateway(self) -> Path:
        return self.root / "gateway"

    def node(self, name: str) -> Path:
        return self.root / "nodes" / name

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def run(self) -> Path:
        """What only a running pool needs: swept when it starts and when it ends."""
        return self.root / "run"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def state(self) -> Path:
        return self.run / "supervisor.json"

    def bus_credentials(self, identity: str) -> Path:
        return self.run / f"{identity}.creds"

    @property
    def observer_credentials(self) -> Path:
        return self.run / "observer.creds"

    @property
    def nats_config(self) -> Path:
        return self.run / "nats.json"

    def prepare(self) -> None:
        """Makes the folders, all closed to others. Raises `OSError`.

        A sandbox's user enters none of them: what it may see is mounted for it before root becomes
        that user.
        """
        nodes = self.root / "nodes"
        for folder in (self.root, self.logs, self.run, self.gateway, self.nats_keys, nodes):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
