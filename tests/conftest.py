"""Before torch: threads stay on their cores, as `retain` runs them (docs/log.md tells why)."""

import os

os.environ.setdefault("OMP_PROC_BIND", "true")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
