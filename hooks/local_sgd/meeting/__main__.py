"""`python -m gradwire.hooks.local_sgd.meeting`: the command `gradwire-meet`."""

import sys

from .server import main

sys.exit(main())
