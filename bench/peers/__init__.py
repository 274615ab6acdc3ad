"""Other servers to measure beside. Each is installed by hand, in a virtual environment of its own.

A script starts one on a free port of this machine, prints its address as a line of its own when it answers, and ends
it when the script itself is told to end (SIGTERM or SIGINT to its process id).
"""
