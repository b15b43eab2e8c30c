"""What the coordinator's desks share: the ports, the mail, and what is known in memory.

All of it can be lost: a restart finds in SQL, or is told again, what it needs.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from potluck.coordinator.liveness import Watch
from potluck.coordinator.mail import Mail
from potluck.coordinator.membership import Roster
from potluck.coordinator.replicas import Publisher
from potluck.messages.membership import Deploy
from potluck.ports.clock import Clock
from potluck.ports.ids import Ids
from potluck.ports.keys import Verifier
from potluck.ports.store import DeploymentRow, Store


@dataclass(slots=True, kw_only=True)
class State:
    mail: Mail
    store: Store
    clock: Clock
    ids: Ids
    verifier: Verifier
    roster: Roster
    watch: Watch
    publisher: Publisher
    deployments: Sequence[DeploymentRow] = ()
    deploy: Deploy = field(default_factory=lambda: Deploy(revision=0, deployments=[]))
    """The same, as nodes are told."""
    books_balance: bool = True
    """When last looked up; `status` shows it."""
    outbox_full: asyncio.Event = field(default_factory=asyncio.Event)
    """Something was recorded that must be told."""
