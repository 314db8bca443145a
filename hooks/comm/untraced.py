"""Python that `torch.compile` leaves as it is, with all that it calls: exchanges wait, and count what they do."""

from __future__ import annotations

from torch._compile import _disable_dynamo

#: Decorates what compiled code may enter, or autograd may call inside of it. `torch.compiler.disable` does the same,
#: and imports Dynamo when it decorates, which takes as long as importing torch; this one does at the first call.
untraced = _disable_dynamo
