"""The demo by the name it had in 0.2: run `gradwire.benchmarks.learning.demo`. This name goes in 0.4."""

from __future__ import annotations

import sys
import warnings

from ..learning.demo import main

if __name__ == "__main__":
    warnings.warn(
        "gradwire.benchmarks.training.demo is now gradwire.benchmarks.learning.demo; this name goes in 0.4",
        FutureWarning,
        stacklevel=1,
    )
    sys.exit(main())
