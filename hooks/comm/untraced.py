"""A decorator that keeps `torch.compile` out of a function and all that it calls, as exchanges wait and count."""

from __future__ import annotations

from torch._compile import _disable_dynamo

#: Decorates functions that compiled code, or autograd inside of it, may call. `torch.compiler.disable` does the same,
#: but imports Dynamo when it decorates, which takes as long as importing torch; this one does at the first call.
untraced = _disable_dynamo
