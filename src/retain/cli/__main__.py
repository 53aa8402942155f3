"""Run `retain` as `python -m retain.cli`."""

import sys

from retain.cli.main import main

sys.exit(main())
