"""Which accelerators this machine has: none that Potluck can drive yet, said plainly."""

from collections.abc import Sequence

from potluck.ports.accelerators import Accelerator


class NoAccelerators:
    """A machine that computes on its CPUs."""

    def list(self) -> Sequence[Accelerator]:
        return ()
