"""`gradwire-bench`: the measurements behind gradwire's figures."""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
from collections.abc import Sequence

from . import publish
from .advisor import advise, priority
from .codec import codecs, entropy_coding, patches, warm
from .common.launch import LinkError
from .elastic import elastic
from .gpu import gpu, gpu_model, host
from .learning import learn, train
from .links import run
from .sparse import allreduce
from .steps import exchange, hsdp, paired, pipeline, profile, step

COMMANDS = {
    "codecs": (codecs, "time every codec beside the memory roofline and what one would write in torch"),
    "entropy": (entropy_coding, "measure an entropy coder behind the codecs: bits, time, and on which links it pays"),
    "allreduce": (allreduce, "compare the algorithms of sparse all-reduce on links of known speed"),
    "step": (step, "time a DDP step on links of a known speed, beside PyTorch's own hooks"),
    "paired": (
        paired,
        "compare the steps of several arms to a percent, such as what a hook costs beside PyTorch's own",
    ),
    "hsdp": (hsdp, "time a step of sharded replicas on links of a known speed between nodes, beside FSDP's own HSDP"),
    "pipeline": (pipeline, "time a step of a pipeline, with codes between its stages, on links of a known speed"),
    "exchange": (exchange, "time the exchange of one gradient on links of several speeds, beside PyTorch's hooks"),
    "train": (train, "train with each way of exchanging gradients, and find the time to equal loss at each bandwidth"),
    "learn": (learn, "train with each way of compressing, on ranks that share a process: loss against bytes"),
    "advise": (advise, "predict from measurements here whether compression pays on a given network"),
    "priority": (
        priority,
        "simulate steps whose forward pass begins before the last gradient is in, as P3's",
    ),
    "elastic": (elastic, "kill and restart replicas of LocalUpdates on links of known speed: goodput, loss and stalls"),
    "links": (run, "run a program on links of a known speed and length"),
    "profile": (profile, "draw one bucket's way through a real step"),
    "patch": (patches, "count bytes and seconds of patches of weights between checkpoints of fine-tuning"),
    "publish": (publish, "regenerate every figure of docs/benchmark-tables.md"),
    "warm": (warm, "compile kernels ahead, so that no training begins with it"),
    "gpu-model": (gpu_model, "count the CUDA kernels' instructions, and model what they take on GPUs; needs none"),
    "host": (host, "time what the CUDA backend takes of the host, a bucket, with launches left out; needs no GPU"),
    "gpu": (gpu, "test, check and time the CUDA kernels on this machine's GPU"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark. Returns the exit status: 0, or 2 with one sentence when it cannot be run here."""
    parser = argparse.ArgumentParser(prog="gradwire-bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(command)
    options = parser.parse_args(arguments)
    if options.command not in ("warm", "gpu") and importlib.util.find_spec("rich") is None:
        return _fail("the benchmarks need a few more packages: pip install 'gradwire[bench]'")
    before = signal.signal(signal.SIGTERM, _terminate)  # so that it cleans up too
    try:
        return COMMANDS[options.command][0].run(options)
    except (LinkError, ValueError) as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _fail("interrupted") + 128
    finally:
        signal.signal(signal.SIGTERM, before)


def _fail(sentence: str) -> int:
    print(f"gradwire-bench: {sentence}", file=sys.stderr)
    return 2


def _terminate(number: int, frame: object) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
