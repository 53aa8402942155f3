"""Run `cachecheck` as `python -m cachecheck`."""

import sys

from cachecheck.command import main

sys.exit(main())
