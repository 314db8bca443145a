"""Imports run one way: csrc ← formats ← backends ← codecs ← feedback ← comm ← network ← exchanges ← {sparse, auto} ←
training ← core ← {backend, ddp, local_sgd, fsdp, horovod, pipelining, sufficient_factors} ← {optim, trainers} ←
benchmarks.
Fronts do not import each other, and training and core know no DDP.

`violations` reads sources, not modules, so that an import inside a function or under TYPE_CHECKING counts as well.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("benchmarks", "compress", "csrc", "hooks", "optim", "trainers")

#: From the bottom up: a module may import what stands on a lower line, or beside it. The first match counts.
LAYERS = (
    ("kernels", r"csrc(\..+)?"),
    ("formats", r"compress\.formats(\..+)?"),
    ("backends", r"compress\.backends(\..+)?"),
    ("patches", r"compress\.patches(\..+)?"),
    ("codec contract", r"compress\.(codec|sparse_codec|deprecated)"),
    ("codecs", r"compress\.(?!feedback(\.|$)).+"),
    ("feedback", r"compress\.feedback(\.(?!store$).+)?"),
    ("feedback store", r"compress\.feedback\.store"),
    ("compress", r"compress"),
    ("messages", r"hooks\.(timeouts|comm(\..+)?)"),
    ("network", r"hooks\.network(\..+)?"),
    ("exchanges", r"hooks\.exchanges(\..+)?"),
    ("choices", r"hooks\.(auto|sparse)(\..+)?"),
    ("training", r"hooks\.training(\..+)?"),
    ("core", r"hooks\.core(\..+)?"),
    ("fronts", r"hooks\.(backend|ddp|local_sgd|fsdp|horovod|pipelining|sufficient_factors)(\..+)?"),
    ("public hooks", r"hooks"),
    ("optimizers", r"optim(\..+)?"),
    ("trainers", r"trainers(\..+)?"),
    ("public names", r"(meet|plugin)?"),
    ("benchmarks", r"benchmarks(\..+)?"),
)

#: What the modules of a folder must never import.
TRAINERS = ("accelerate", "lightning", "transformers")
FORBIDDEN = {
    "csrc": ("torch",),
    "compress": ("torch.distributed", *TRAINERS),
    "hooks": ("cupy", "numba", *TRAINERS),
    "hooks/core": ("torch.nn.parallel",),
    "hooks/training": ("torch.nn.parallel",),
    "benchmarks": TRAINERS,
    "optim": ("cupy", "numba", *TRAINERS),
}


#: The source of a name, as `ast.dump` writes it.
TORCH = ast.dump(ast.Name("torch", ast.Load()))


class Import(NamedTuple):
    line: int
    target: str  # "compress.codec" or "" (the root) if `relative`, otherwise as written
    relative: bool


def height(module: str) -> int:
    return next(i for i, (_, pattern) in enumerate(LAYERS) if re.fullmatch(pattern, module))


@functools.cache
def nodes(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def imports(module: str, source: str, modules: Mapping[str, str]) -> Iterator[Import]:
    """Every import in `source`. `from a import b` is an import of a.b where b may be a module."""
    is_package = module == "" or any(name.startswith(f"{module}.") for name in modules)
    package = [name for name in module.split(".") if name][: None if is_package else -1]
    for node in nodes(source):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name, False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (Import(node.lineno, f"{node.module}.{alias.name}", False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1] + ([node.module] if node.module else []))
            for alias in node.names:
                if not base and alias.name == "__version__":
                    continue  # a constant, and the only thing that the root has of its own
                submodule = f"{base}.{alias.name}".lstrip(".")
                yield Import(node.lineno, submodule if submodule in modules else base, True)
        elif isinstance(node, ast.Attribute) and node.attr == "distributed" and ast.dump(node.value) == TORCH:
            yield Import(node.lineno, "torch.distributed", False)  # `import torch` alone makes it usable


def violations(modules: Mapping[str, str]) -> list[str]:
    """What is wrong with the imports of `modules`, sources by module name ("" for the root, "compress.codec" …)."""
    found = []
    graph: dict[str, set[str]] = {module: set() for module in modules}
    for module, source in modules.items():
        folder, own = module.split(".")[0], height(module)
        for line, target, relative in imports(module, source, modules):
            where = f"{module or '__init__'}:{line}: imports {target or 'the root'}"
            if relative:
                graph[module].add(target)
                theirs = height(target)
                if theirs > own:
                    found.append(f"{where} ({LAYERS[theirs][0]}) from below ({LAYERS[own][0]})")
                if LAYERS[theirs][0] == LAYERS[own][0] == "fronts" and target.split(".")[1] != module.split(".")[1]:
                    found.append(f"{where}, beside it")
                continue
            top = target.split(".")[0]
            for place, names in FORBIDDEN.items():
                inside = f"{module}.".startswith(f"{place.replace('/', '.')}.")
                if inside and any(target == name or target.startswith(f"{name}.") for name in names):
                    found.append(f"{where}, which {place}/ never does")
            if top in (*FOLDERS, "tests"):
                found.append(f"{where} by the name of a folder, which only the repository has")
            if top == "gradwire" and folder != "benchmarks":
                found.append(f"{where} absolutely: write a relative import")
    return found + [f"{' → '.join(cycle)}: imports run in a circle" for cycle in cycles(graph)]


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """One path for each circle that a walk in depth meets; a package's own `__init__` counts where it is imported."""
    found: list[list[str]] = []
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> None:
        if module in path:
            found.append([*path[path.index(module) :], module])
        elif module not in done and module in graph:
            for target in sorted(graph[module] - {module}):
                walk(target, [*path, module])
            done.add(module)

    for module in graph:
        walk(module, [])
    return found


@functools.cache
def library() -> dict[str, str]:
    paths = [*ROOT.glob("*.py"), *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    return {
        name.removesuffix("__init__").rstrip("."): path.read_text("utf-8")
        for name, path in zip(names, paths, strict=True)
    }


def test_imports_run_one_way() -> None:
    assert not violations(library())


def test_the_picture_of_the_rooms_is_drawn_from_these_imports() -> None:
    import page_pictures

    drawn = page_pictures.ROOMS.read_text("utf-8")
    assert page_pictures.rooms_picture(library()) == drawn, "run `python tests/support/page_pictures.py`"
    changed = library() | {"csrc": "from ..hooks.comm import group"}
    with pytest.raises(ValueError, match="imports run in a circle"):
        page_pictures.rooms_picture(changed)


def test_unpickling_happens_where_the_security_policy_says() -> None:
    trusted = ("hooks.horovod.", "compress.backends.cpu.")  # other ranks' objects and commits; compiled kernels
    found = set()
    for module, source in library().items():
        if re.search(r"pickle\.loads?\(|Unpickler\(|weights_only=False", source):
            found.add(next((room for room in trusted if module.startswith(room)), module))
        assert source.count("torch.load(") == len(re.findall(r"torch\.load\(.*weights_only=", source)), module
    assert found == set(trusted)


#: Of each rule a module that breaks it, and what is said.
BAD = [
    ("compress.codec", "def f():\n    from .codecs.topk import TopK", "compress.codec:2: imports compress.codecs.topk"),
    ("hooks.comm.pipeline", "if TYPE_CHECKING:\n    from ..core.reducer import R", "in a circle"),
    ("hooks.core.reducer", "from torch.nn.parallel import DistributedDataParallel", "which hooks/core/ never does"),
    ("hooks.fsdp.replicate", "from ..ddp.hook import compress_hook", "hooks.ddp.hook, beside it"),
    ("compress.codecs.topk", "import torch.distributed as dist", "torch.distributed, which compress/ never does"),
    ("compress.codecs.topk", "import torch\ntorch.distributed.barrier()", "compress.codecs.topk:2"),
    ("compress.codecs.topk", "from gradwire.compress.codec import Codec", "absolutely"),
    ("benchmarks.learning.demo", "import tests.helper", "by the name of a folder"),
]


@pytest.mark.parametrize(("module", "source", "complaint"), BAD)
def test_a_bad_import_is_found(module: str, source: str, complaint: str) -> None:
    modules = library()
    assert module in modules
    found = violations(modules | {module: source})
    assert any(complaint in violation for violation in found), found
