"""What each node should serve, compared with what it says it serves, and said again until it does.

Level-triggered: the whole desired state each time, so that no lost order matters for long.
"""

from collections.abc import Sequence

from potluck.coordinator.membership import Member
from potluck.messages import membership
from potluck.messages.membership import Deploy, Deployment
from potluck.ports.store import DeploymentRow


def wanted(deployments: Sequence[DeploymentRow]) -> Deploy:
    """Every model on every node. The revision grows with each change of any deployment."""
    return Deploy(
        # Of the retired ones too: what nodes should no longer serve is news like any other.
        revision=max((row.revision for row in deployments), default=0),
        deployments=[
            Deployment(manifest=membership.manifest_decoder.decode(row.manifest), slots=row.slots)
            for row in deployments
            if not row.retired
        ],
    )


def differs(member: Member, deploy: Deploy) -> bool:
    """Whether an alive node must be told. What failed on it is its own to try again."""
    if member.node.liveness != "alive":
        return False
    report = member.report
    if report is None or report.deploy_revision != deploy.revision:
        return True
    should = {one.manifest.digest for one in deploy.deployments}
    return should != {one.digest for one in report.replicas if one.state != "stopping"}
