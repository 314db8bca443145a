"""The line by which a user sees what is sent: whether compression is on, and if not, why."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, is_dataclass

from ...compress.codec import Codec
from ...compress.codecs.cast import Cast
from ..auto.controller import Controller
from ..auto.planner import Choice, Plan
from ..exchanges import Dense
from ..network.cost import Decision
from .statistics import Statistics, fewer

log = logging.getLogger("gradwire")
#: Factor by which the bytes must change for another line: a schedule may change them a little in every step.
NOTABLE = 2.0


def say(text: str, level: int = logging.INFO) -> None:
    """Log a line; where nobody has set up logging, write it to stderr, which Python would do for warnings only.
    `logging.lastResort = None` and the logger's own level hold there, too."""
    if log.hasHandlers() or logging.lastResort is None:
        log.log(level, text)
    elif not log.disabled and level >= log.level and level > logging.root.manager.disable:
        record = log.makeRecord(log.name, level, __file__, 0, text, (), None)
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        if log.filter(record):
            handler.handle(record)


def tell(
    statistics: Statistics,
    text: str,
    kinds: frozenset[str] = frozenset(),
    ratio: float = 1.0,
    level: int = logging.INFO,
) -> None:
    """`say` the text, unless the last line said nearly the same.

    Args:
        statistics: remembers that.
        text: for people.
        kinds: what is sent: another set makes another line.
        ratio: the bytes of float32 divided by those sent.
    """
    before = statistics.told
    if before is None or before[0] != kinds or not 1 / NOTABLE < ratio / before[1] < NOTABLE:
        statistics.told = kinds, ratio
        say(text, level)


def report(
    statistics: Statistics,
    choice: Choice,
    plans: Sequence[Plan],
    size: tuple[int, int],
    *,
    rows: int = 0,
    why: Sequence[Decision | str] = (),
    controller: Controller | None = None,
) -> None:
    """Say what a step has sent, unless it is what the last line said.

    Args:
        choice: the step's.
        plans: of its buckets.
        size: bytes of the gradients as float32, and bytes sent.
        rows: number of sparse gradients.
        why: reasons of the plans.
        controller: knows of trials.
    """
    begins, auto = controller is not None and controller.tuning, choice.exchange == "auto"
    if begins and statistics.told is not None:
        return
    parts = Counter(_text(plan) for plan in plans)
    if rows:
        parts["rows of sparse gradients"] = rows
    less = [plan for plan in plans if auto and _falls_back(plan, choice)]
    kinds = {f"{plan.exchange} {type(plan.codec).__name__}" for plan in plans} | {f"rows {bool(rows)}"}
    counted = [f"{text} ({number} of {parts.total()} buckets)" for text, number in parts.most_common()]
    what = (", ".join(counted) if len(parts) > 1 else "".join(parts)) or "float32"
    text = ("'auto' " if auto else "") + ("begins with " if begins else "sends ") + what
    if choice.warmup:
        kinds.add("warm-up")
        text += f" in the first {choice.warmup} steps" if choice.warmup > 1 else " in the first step"
        text += f" (warmup_steps={choice.warmup})"
    elif less and len(less) == len(plans):
        text += f" instead of {brief(choice.codec)}"
    text += fewer(*size)
    timed = controller.timed if controller is not None and auto else {}
    seconds = timed if len(timed) > 1 else _predicted(why)
    if len(seconds) > 1:
        times = ", ".join(f"{name} {t * 1e3:.3g} ms" for name, t in sorted(seconds.items(), key=lambda item: item[1]))
        text += f"; {'timed' if seconds is timed else 'predicted'} for a step: {times}"
    if begins:
        kinds.add("begins")
        text += "; the next steps are timed with and without compression"
    elif less:
        text += "; fallback=None compresses always"
    ratio = size[0] / size[1] if all(size) else 1.0
    tell(statistics, text, frozenset(kinds), ratio, logging.WARNING if less and not begins else logging.INFO)


def brief(codec: Codec) -> str:
    """The codec as a user would write it: its first argument, and others that are not the defaults."""
    if not is_dataclass(codec):
        return str(codec)
    values = [(each, getattr(codec, each.name)) for each in fields(codec) if each.init and each.repr]
    shown = [(each.name, value) for n, (each, value) in enumerate(values) if not n or value != each.default]
    texts = ((name, brief(value) if isinstance(value, Codec) else repr(value)) for name, value in shown)
    return f"{type(codec).__name__}({', '.join(f'{name}={text}' for name, text in texts)})"


def _text(plan: Plan) -> str:
    if plan.exchange == Dense.name:
        return "float32"
    half = str(plan.codec.dtype).removeprefix("torch.") if isinstance(plan.codec, Cast) else None
    return f"{half or brief(plan.codec)} by {plan.exchange!r}"


def _falls_back(plan: Plan, choice: Choice) -> bool:
    """True if the plan sends more than the user's codec."""
    return not choice.codec.lossless and (plan.exchange == Dense.name or plan.codec != choice.codec)


def _predicted(why: Sequence[Decision | str]) -> dict[str, float]:
    """Predicted seconds of a step, by what it would send."""
    total: dict[str, float] = {}
    for decision in why:
        for kind, seconds in decision.kinds().items() if isinstance(decision, Decision) else ():
            total[kind] = total.get(kind, 0.0) + seconds
    return total
