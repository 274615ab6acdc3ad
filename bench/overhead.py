"""What the host costs beside the model: time per scheduler step, and the server's work per streamed token.

python -m bench.overhead        both tables, against their bars
python -m bench.overhead --quick   fewer steps and streams, to see that it works
"""

import argparse
import os
import sys
from collections.abc import Sequence

from bench.machine import busy_warning, commit, load_average, processor, software


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.overhead", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps and streams")
    parser.add_argument("--rows", type=_counts, default=(1, 32, 256), metavar="1,32,256", help="sequences of a step")
    parser.add_argument("--streams", type=_counts, default=(1, 32, 128), metavar="1,32,128")
    args = parser.parse_args(argv)
    warning = busy_warning(load_average())
    from server.openmp import tame_thread_barriers

    tame_thread_barriers(os.environ)
    from bench.step_costs import step_table
    from bench.stream_costs import stream_table

    print(f"{processor()}; {software()}; commit {commit()}.\n")
    if warning:
        print(f"{warning} Processor time (CPU ms, us/token) still does.\n")
    print(step_table(args.rows, 30 if args.quick else 400), end="\n\n", flush=True)
    print(stream_table(args.streams, 1 if args.quick else 3))
    return 0


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(part) for part in text.split(","))
    if min(counts) < 1:
        raise argparse.ArgumentTypeError("numbers of at least 1 are needed")
    return counts


if __name__ == "__main__":
    sys.exit(main())
