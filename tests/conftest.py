"""Set before torch loads: one thread, and threads that sleep while they wait.

Spinning ones slow a busy machine 40-fold.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
