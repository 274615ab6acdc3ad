"""Before torch is imported: how many threads a test process takes, and how they wait for one another."""

import os

from server.openmp import tame_thread_barriers

num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
os.environ.setdefault("OMP_NUM_THREADS", str(max(2, num_cores // num_workers)))  # two, or no team would be tested
tame_thread_barriers(os.environ)
