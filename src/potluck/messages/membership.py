"""Who is here, what they can do, what they should serve."""

import msgspec

from potluck.core.deployments import ReplicaState
from potluck.core.ids import AccountId, Digest, NodeId
from potluck.core.nodes import Liveness
from potluck.messages.envelope import Body
from potluck.messages.serving import WirePrice


class Accelerator(Body):
    kind: str
    name: str
    memory_bytes: int


class Inventory(Body):
    """What a machine has. Bytes are what the system reports, not what is free."""

    hostname: str
    os: str
    arch: str
    cpu_model: str
    cpu_cores: int
    memory_bytes: int
    disk_free_bytes: int
    accelerators: list[Accelerator]


class Hello(Body):
    """Verb `hello`, at each start and when asked: answered by `Welcome`."""

    public_key: bytes
    """Ed25519; its fingerprint is the sender's id."""
    name: str
    account: AccountId
    """Whom its work pays."""
    version: str
    tier: str
    tier_reason: str
    inventory: Inventory


class Welcome(Body):
    """`refusal` empty: the node belongs to the pool."""

    refusal: str = ""


class ReplicaReport(Body):
    digest: Digest
    state: ReplicaState
    slots: int
    in_flight: int
    context_tokens: int
    detail: str = ""
    """The cause of a failure, or the sandbox, for people."""
    fetched_bytes: int = 0
    """While `fetching`: how many of the model's bytes are here, or verified."""


class Heartbeat(Body):
    """Verb `heartbeat`: liveness and all that a node serves."""

    replicas: list[ReplicaReport]
    deploy_revision: int
    cpu_percent: float
    memory_free_bytes: int
    disk_free_bytes: int
    receipts_waiting: int


class Bye(Body):
    """Verb `bye`: a graceful end."""

    reason: str


class Rehello(Body):
    """Verb `rehello`: the coordinator does not know this node (any more)."""


class Source(Body):
    """Where a model's bytes may come from."""

    kind: str
    """`wheel` (`location` is `package==version/path/in/package`) or `path`."""
    location: str


class Manifest(Body):
    """A model: one file named by its digest, and what must be known before it is loaded."""

    name: str
    digest: Digest
    size_bytes: int
    format: str
    sources: tuple[Source, ...]
    context_tokens: int
    """For each slot."""
    memory_bytes: int
    redundancy_class: str
    licence: str


class Deployment(Body):
    manifest: Manifest
    slots: int


class Deploy(Body):
    """Verb `deploy`: everything the node should serve, no more and no less."""

    revision: int
    deployments: list[Deployment]


class Greet(Body):
    """Verb `greet`: a gateway presents itself, at each start and when asked. Answer: `Replicas`."""

    public_key: bytes
    version: str


class Regreet(Body):
    """Verb `regreet`: the coordinator does not know this gateway (any more)."""


class WireReplica(Body):
    node: NodeId
    node_name: str
    model: str
    digest: Digest
    context_tokens: int
    slots: int
    price: WirePrice
    liveness: Liveness
    ready: bool


class Replicas(Body):
    """Verb `replicas`, or the answer to `greet`. `whole`: replaces all that the receiver holds."""

    epoch: str
    follows: int
    offset: int
    whole: bool
    changed: list[WireReplica]
    removed: list[tuple[NodeId, Digest]]


class Notice(Body):
    """Verb `notice`: forget what is cached under this name."""

    kind: str
    """`key`: the SHA-256 of a revoked key."""
    name: str


hello_decoder = msgspec.msgpack.Decoder(Hello)
welcome_decoder = msgspec.msgpack.Decoder(Welcome)
manifest_decoder = msgspec.msgpack.Decoder(Manifest)
heartbeat_decoder = msgspec.msgpack.Decoder(Heartbeat)
bye_decoder = msgspec.msgpack.Decoder(Bye)
rehello_decoder = msgspec.msgpack.Decoder(Rehello)
deploy_decoder = msgspec.msgpack.Decoder(Deploy)
greet_decoder = msgspec.msgpack.Decoder(Greet)
regreet_decoder = msgspec.msgpack.Decoder(Regreet)
replicas_decoder = msgspec.msgpack.Decoder(Replicas)
notice_decoder = msgspec.msgpack.Decoder(Notice)
manifest_json_decoder = msgspec.json.Decoder(Manifest)
