"""`gradwire-bench`: measurements of your model and network, and those behind gradwire's figures."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import signal
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

#: Commands by whom they are for: name, module, summary. A module is imported when its command is asked for.
GROUPS = {
    "your model, network and GPU": {
        "advise": ("steps.advise", "measure whether compression makes your model's steps faster"),
        "codecs": ("codec.codecs", "time every codec beside the memory roofline and torch's operations"),
        "warm": ("codec.warm", "compile kernels ahead, so that no training begins with it"),
        "links": ("links.run", "run a program on links of a known speed and length"),
        "gpu": ("gpu.gpu", "test, check and time the CUDA kernels on this machine's GPU"),
    },
    "steps and exchanges on links of a known speed": {
        "step": ("steps.step", "time a DDP step, beside PyTorch's own hooks"),
        "paired": ("steps.paired", "compare the steps of several arms to a percent"),
        "exchange": ("steps.exchange", "time the exchange of one gradient, beside PyTorch's hooks"),
        "hsdp": ("steps.hsdp", "time a step of sharded replicas, beside FSDP's own HSDP"),
        "pipeline": ("steps.pipeline", "time a step of a pipeline, with codes between its stages"),
        "allreduce": ("sparse.allreduce", "compare the algorithms of sparse all-reduce"),
    },
    "loss": {
        "learn": ("learning.learn", "train each way, on ranks that share a process: loss and bytes"),
        "train": ("learning.train", "find the time to equal loss of each way, at each bandwidth"),
    },
    "patches of weights": {
        "patch": ("codec.patches", "count bytes and seconds of patches of weights between checkpoints"),
    },
    "the project's own figures": {
        "publish": ("publish", "regenerate every figure of docs/tables-*.md"),
    },
}
COMMANDS = {name: entry for group in GROUPS.values() for name, entry in group.items()}
#: Commands that need nothing of `gradwire[bench]`.
PLAIN = ("warm", "gpu", "step")
#: So many choices do not fit into a line of usage.
MANY = 3


class _Paragraphs(argparse.HelpFormatter):
    """Fits descriptions to the terminal, paragraph by paragraph, where lines are indented line by line; and long lists
    of choices, which it moves to the option's help."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        found = list[str]()
        for part in text.strip().split("\n\n"):
            lines = part.splitlines() if "\n  " in f"\n{part}" else [part]
            for line in lines:
                column = re.match(r" *\S+ {2,}", line)  # where a list's second column begins
                found.append(textwrap.fill(line, width, subsequent_indent=" " * (column.end() if column else 0)))
            found.append("")
        return "\n".join(found).rstrip()

    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Any:
        if action.choices is None or action.metavar is not None or len(list(action.choices)) < MANY:
            return super()._metavar_formatter(action, default_metavar)
        return lambda size: (default_metavar,) * size

    def _get_help_string(self, action: argparse.Action) -> str | None:
        many = action.choices is not None and action.metavar is None and len(list(action.choices)) >= MANY
        of = f"of {', '.join(map(str, action.choices or ()))}" * many
        return "; ".join(filter(None, (action.help, of)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark. Returns the exit status: 0, or 2 with one sentence when it cannot be run here."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="gradwire-bench",
        usage="%(prog)s [-h] command ...",
        description=__doc__,
        epilog=_listed(),
        formatter_class=_Paragraphs,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="command", help="one of those below; each has a --help")
    command = parser.parse_args(given[:1]).command
    if command not in PLAIN and importlib.util.find_spec("rich") is None:
        return _fail("the benchmarks need a few more packages: pip install 'gradwire[bench]'")
    asked = module(command)
    parser = argparse.ArgumentParser(
        prog=f"gradwire-bench {command}",
        description=asked.__doc__,
        formatter_class=_Paragraphs,
    )
    asked.add_arguments(parser)
    options = parser.parse_args(given[1:])
    from .common.launch import LinkError
    from .links.links import NoRoot, as_root_of_its_own

    before = signal.signal(signal.SIGTERM, _terminate)  # so that it cleans up too
    try:
        status: int = asked.run(options)
        return status
    except NoRoot as error:
        as_root_of_its_own(__spec__.name, given)
        return _fail(str(error))
    except (LinkError, ValueError) as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _fail("interrupted") + 128
    finally:
        signal.signal(signal.SIGTERM, before)


def module(command: str) -> Any:
    """A command's module: its docstring is its description, and it has `add_arguments` and `run`."""
    return importlib.import_module(f".{COMMANDS[command][0]}", __package__)


def _listed() -> str:
    """All commands, by their groups."""
    width, lines = max(map(len, COMMANDS)), list[str]()
    for title, group in GROUPS.items():
        lines += [f"{title}:", *(f"  {name:<{width}}  {summary}" for name, (_, summary) in group.items()), ""]
    return "\n".join(lines)


def _fail(sentence: str) -> int:
    print(f"gradwire-bench: {sentence}", file=sys.stderr)
    return 2


def _terminate(number: int, frame: object) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
