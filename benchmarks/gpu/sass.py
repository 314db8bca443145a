"""Machine code as nvdisasm lists it: basic blocks, loops, and the instructions on the hot path through one, by class.

The *hot path* is the path from a loop's header back to it that scores highest: points for the instructions that only
the aligned path has (`wanted`), minus a little for each instruction. A loop inside stands in it as often as it is run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

#: Class of an instruction, by a pattern for its opcode; the first that matches counts.
CLASSES: tuple[tuple[str, str], ...] = (
    ("load 16 B", r"LDG\.E(?:\.\w+)*\.128"),
    ("load narrow", r"LDG|LD\."),
    ("store 16 B", r"STG\.E(?:\.\w+)*\.128"),
    ("store narrow", r"STG|ST\."),
    ("local", r"LDL|STL"),
    ("shared", r"LDS|STS|ATOMS"),
    ("global atomic", r"ATOM|ATOMG|RED\b|RED\."),
    ("shuffle", r"SHFL|VOTE|MATCH|REDUX"),
    ("barrier", r"BAR|WARPSYNC|BSSY|BSYNC|NOP|DEPBAR|MEMBAR|ERRBAR|CCTL"),
    ("XU", r"MUFU|F2I|I2F\.|POPC|FLO|BREV|F2F|FRND"),
    ("FP32", r"FADD|FMUL|FFMA"),
    ("IMAD", r"IMAD|IDP|VIMAD"),
    ("uniform", r"U[A-Z]|R2UR|LDC|ULDC|S2UR|LDCU"),
    ("branch", r"BRA|BRX|CALL|RET|EXIT|BREAK|JMP|BMOV|ACQBULK|PREEXIT"),
    ("ALU", r"."),  # integers, logic, comparison, selection
)
INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
TARGET = re.compile(r"`\((\.L_x_\d+|[^)]+)\)")


@dataclass(frozen=True)
class Instruction:
    predicate: str
    opcode: str
    operands: str

    @property
    def kind(self) -> str:
        return next(name for name, pattern in CLASSES if re.match(pattern, self.opcode))

    @property
    def stem(self) -> str:
        return self.opcode.split(".")[0]

    def jumps(self) -> bool:
        """A branch, or a call of a label inside the function, by which ptxas leaves some loops."""
        if self.stem == "CALL":
            return "`(.L_x_" in self.operands
        return self.stem == "BRA" and ".DIV" not in self.opcode

    def ends_block(self) -> bool:
        return self.jumps() or (self.stem in ("BRA", "EXIT", "RET", "BRX", "BSYNC") and ".DIV" not in self.opcode)


@dataclass
class Block:
    body: list[Instruction] = field(default_factory=list)
    to: list[str] = field(default_factory=list)


Blocks = dict[str, Block]


@dataclass
class Loop:
    """A natural loop, with those inside it."""

    header: str
    latches: set[str]
    body: set[str]
    inner: list[Loop] = field(default_factory=list)

    def all(self) -> Iterator[Loop]:
        """The loops inside, at any depth."""
        for loop in self.inner:
            yield loop
            yield from loop.all()


@dataclass
class Hot:
    """A path through a loop, and what is on it by class."""

    score: float
    counts: Counter[str]


def kernel_lines(listing: str, kernel: str) -> list[str]:
    """The lines of one kernel in what `nvdisasm -c` prints.

    Raises:
        ValueError: it is not there.
    """
    _, found, rest = listing.partition(f"\n.text.{kernel}:\n")
    if not found:
        raise ValueError(f"the machine code has no kernel {kernel}")
    return rest.split("\n//----", 1)[0].splitlines()


def blocks_of(lines: list[str]) -> Blocks:
    """Basic blocks by label, the first one "entry". A call counts as an instruction; where it goes is left out."""
    blocks: Blocks = {"entry": Block()}
    current, ended = blocks["entry"], False
    joins: dict[str, str] = {}  # where the BSSY of a register said that threads meet again

    def begin(label: str) -> Block:
        if not ended:
            current.to.append(label)
        blocks[label] = Block()
        return blocks[label]

    for line in lines:
        label = re.match(r"(\.L_x_\d+|\$\S+):", line)
        if label is not None:
            current, ended = begin(label[1]), False
            continue
        match = INSTRUCTION.match(line)
        if match is None:
            continue
        if ended or (current.body and current.body[-1].ends_block()):
            current, ended = begin(f"+{len(blocks)}"), False
        one = Instruction(match[1] or "", match[2], match[3])
        current.body.append(one)
        always = not one.predicate and not re.match(r"!?U?P\d", one.operands)
        target = TARGET.search(one.operands)
        if one.jumps():
            if target is not None:
                current.to.append(target[1])
            ended = always
        elif one.stem == "BSSY":
            if target is not None:
                joins[one.operands.partition(",")[0].strip()] = target[1]
        elif one.stem == "BSYNC":
            if one.operands.strip() in joins:
                current.to.append(joins[one.operands.strip()])
                ended = not one.predicate
        elif one.stem in ("EXIT", "RET", "BRX"):
            ended = not one.predicate
    return blocks


def dominators(blocks: Blocks) -> dict[str, set[str]]:
    """For each block that is reached, those on every path to it."""
    order: list[str] = []
    stack = ["entry"]
    while stack:
        label = stack.pop()
        if label not in order:
            order.append(label)
            stack += [to for to in blocks[label].to if to in blocks]
    before = {label: [other for other in order if label in blocks[other].to] for label in order}
    above = {label: set(order) for label in order}
    above["entry"] = {"entry"}
    changed = True
    while changed:
        changed = False
        for label in order[1:]:
            now = set.intersection(*(above[other] for other in before[label])) | {label}
            if now != above[label]:
                above[label], changed = now, True
    return above


def loops_of(blocks: Blocks) -> list[Loop]:
    """The outermost loops, each with those inside it."""
    above = dominators(blocks)
    before: dict[str, list[str]] = {}
    for label in above:
        for to in blocks[label].to:
            before.setdefault(to, []).append(label)
    found: dict[str, Loop] = {}
    for label in above:
        for to in blocks[label].to:
            if to not in above[label]:
                continue
            loop = found.setdefault(to, Loop(to, set(), {to}))
            loop.latches.add(label)
            stack = [label]
            while stack:
                here = stack.pop()
                if here not in loop.body:
                    loop.body.add(here)
                    stack += [other for other in before.get(here, []) if other in above]
    every = sorted(found.values(), key=lambda loop: len(loop.body))
    outermost: list[Loop] = []
    for i, loop in enumerate(every):
        parent = next((other for other in every[i + 1 :] if loop.header in other.body), None)
        (outermost if parent is None else parent.inner).append(loop)
    return outermost


def hot_path(blocks: Blocks, loop: Loop, wanted: Mapping[str, float], trips: Mapping[str, float]) -> Hot:
    """The path from the header to a latch that scores highest.

    Args:
        wanted: points for an instruction, by a pattern for its opcode.
        trips: how often a loop inside is run, by its header; once, unless it is there.
    """
    inner_of = {label: inner for inner in loop.inner for label in inner.body}
    inner_paths = {inner.header: hot_path(blocks, inner, wanted, trips) for inner in loop.inner}
    known: dict[str, Hot | None] = {}

    def own(label: str) -> Hot:
        counts: Counter[str] = Counter()
        score = 0.0
        for one in blocks[label].body:
            counts[one.kind] += 1
            score += sum(points for pattern, points in wanted.items() if re.match(pattern, one.opcode)) - 0.01
            if one.stem == "CALL" and not one.jumps():
                score -= 50  # a slow path
        return Hot(score, counts)

    def best(label: str) -> Hot | None:
        if label in known:
            return known[label]
        known[label] = None  # not twice on one path
        inner = inner_of.get(label)
        if inner is None:
            here, nexts, latched = own(label), blocks[label].to, label in loop.latches
        else:
            path, times = inner_paths[inner.header], trips.get(inner.header, 1.0)
            # Who says how often a loop runs means it to run.
            score = path.score * times + (1000.0 if trips.get(inner.header, 0.0) > 0 else 0.0)
            here = Hot(score, Counter({kind: n * times for kind, n in path.counts.items()}))
            nexts = [to for block in inner.body for to in blocks[block].to if to not in inner.body]
            latched = bool(inner.body & loop.latches)
        inside = [to for to in nexts if to in loop.body and to != loop.header]
        choices = [rest for to in inside if (rest := best(to)) is not None]
        if latched:
            choices.append(Hot(0.0, Counter()))
        if choices:
            rest = max(choices, key=lambda choice: choice.score)
            known[label] = Hot(here.score + rest.score, here.counts + rest.counts)
        return known[label]

    found = best(loop.header)
    if found is None:
        raise ValueError(f"no way back to {loop.header}")
    return found
