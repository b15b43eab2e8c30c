"""Where messages go: `potluck.v1.<pool>.<sender>.<verb>.<receiver>`.

One publishes only under one's own id and subscribes only where one is the receiver (coordinators
also at `_`); the server's permissions thereby say who sent what.
"""

from typing import Final, Literal

from potluck.core.ids import ANY_COORDINATOR

PREFIX: Final = "potluck.v1"

Verb = Literal[
    # gateway to node, node to gateway: batches of frames
    "serve",
    "frames",
    # gateway to coordinator
    "greet",
    "hold",
    "renew",
    "release",
    "countersign",
    "query",
    "command",
    # node to coordinator
    "hello",
    "heartbeat",
    "bye",
    "receipts",
    # coordinator to node
    "deploy",
    "rehello",
    "receipts_ack",
    # coordinator to gateway
    "replicas",
    "settled",
    "notice",
    "regreet",
]


def subject(pool: str, sender: str, verb: Verb, receiver: str) -> str:
    return f"{PREFIX}.{pool}.{sender}.{verb}.{receiver}"


def received_by(pool: str, receiver: str, verb: str = "*") -> str:
    """What a receiver subscribes to: this verb, or all, from anybody."""
    return f"{PREFIX}.{pool}.*.{verb}.{receiver}"


def sent_by(pool: str, sender: str) -> str:
    """What a sender may publish."""
    return f"{PREFIX}.{pool}.{sender}.>"


def inbox_prefix(identity: str) -> str:
    """Answers to one's queries come back here."""
    return f"_INBOX.{identity}"


def to_coordinator(pool: str, sender: str, verb: Verb) -> str:
    return subject(pool, sender, verb, ANY_COORDINATOR)


def sender_of(text: str) -> str:
    """The sender in a subject that the server has let through."""
    return text.split(".", 4)[3]


def verb_of(text: str) -> str:
    return text.split(".", 5)[4]
