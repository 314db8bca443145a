"""`python -m gradwire.meet`: the command `gradwire-meet`, the meeting point of replicas that come and go."""

import sys

from .hooks.local_sgd.meeting.server import main

if __name__ == "__main__":
    sys.exit(main())
