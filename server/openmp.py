"""How the threads of the CPU's operators wait for each other. Must be decided before torch is imported."""

from collections.abc import MutableMapping

SPIN_COUNT = "1000"


def tame_thread_barriers(environ: MutableMapping[str, str]) -> None:
    """Let OpenMP threads spin briefly and then sleep at barriers.

    Long spinning collapses as soon as another process wants a core. A user's own setting wins.
    """
    if "OMP_WAIT_POLICY" not in environ and "GOMP_SPINCOUNT" not in environ:
        environ["GOMP_SPINCOUNT"] = SPIN_COUNT
