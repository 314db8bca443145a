"""Regenerate every figure of docs/tables-*.md: run the whole set, then write its tables into the pages.

Each entry of the set is one `gradwire-bench` command, which writes its JSON file to benchmarks/results/ and its picture
to docs/. Those that need shaped links are left out where links cannot be had, and said to be; their older figures stay.
Run it in a clone, on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..hooks import backend
from . import cli
from .common import report
from .links import links

ROOT = Path(__file__).resolve().parent.parent
RESULTS, DOCS = Path("benchmarks/results"), Path("docs")
PAGES = "tables-*.md"
#: The page of figures of a GPU: a file of them that is not there yet has a place without a table.
GPU_PAGE = "gpu.md"


@dataclass(frozen=True)
class Publication:
    """One command of the set.

    Attributes:
        name: of its JSON file, without the ending, and of its place in the page.
        command: the subcommand and its options, without `--json` and `--plot`.
        plot: whether it draws docs/`name`.png.
    """

    name: str
    command: str
    plot: bool = True

    @property
    def json(self) -> Path:
        return RESULTS / f"{self.name}.json"

    @property
    def arguments(self) -> list[str]:
        picture = ["--plot", str(DOCS / f"{self.name}.png")] if self.plot else []
        return [*shlex.split(self.command), "--json", str(self.json), *picture]

    @property
    def shaped(self) -> bool:
        """True if it needs shaped links."""
        options = parsed(self.arguments)
        rates = getattr(options, "rates", None) or [getattr(options, "rate", None)]
        return any(rate not in (None, "none") for rate in rates)

    @property
    def gpu(self) -> bool:
        """True if it needs one; a token bucket limits its links."""
        return "--device cuda" in self.command

    @property
    def there(self) -> bool:
        """False if its file waits for a GPU."""
        return not self.gpu or (ROOT / self.json).exists()


#: Beginnings that commands share, by name.
BEGINNINGS = {
    "large": "train --task large --search --runs benchmarks/results/train.jsonl --readings 10 --timed 8 --warmup 2",
    "learn": "learn benchmarks/results/learn.jsonl",
    "stages": "pipeline --arms float16 q8-q4 q6-q4 q4 --rounds 12 --steps 1",
    "head": "paired --task head --world 4 --reference fp32 --arms fp16 powersgd low-rank factors --warmup 3 --models 1",
    "zeros": "paired --rates 1gbit 10gbit --reference fp32 --arms fp16 blocks --warmup 1 --models 1",
}
#: Each one's name, with a star where it has a picture, and its command.
COMMANDS_OF = """
*exchange: exchange
*train-large: {large} --arms powersgd terngrad topk8 chunked6 chunked1.5 local local30 auto
train-far: {large} --rates 100mbit --delay 25ms --arms powersgd terngrad topk8 chunked6 chunked1.5 local local30 auto
train-low-rank: {large} --rates 100mbit --arms powersgd low-rank
train-low-rank-far: {large} --rates 100mbit --delay 25ms --arms powersgd low-rank
*codecs: codecs
patch: patch
step: step --rate 1gbit --rounds 4 --warmup 4 --arms fp32 fp16 powersgd onebit topk auto hvd-none hvd-onebit hvd-topk
step-far: step --rate 1gbit --delay 25ms --width 512 --layers 8 --bucket-mb 1 --rounds 4 --steps 5 --warmup 3 --arms
    fp16 onebit-gather onebit-two_pass topk-gather auto
step-far-slow: step --rate 100mbit --delay 25ms --rounds 3 --steps 3 --warmup 2 --arms fp16 onebit-gather topk-gather
paired: paired --rounds 900 --arms fp32 python dense auto
paired-digits: paired --task digits --rates 100mbit 300mbit 600mbit 1gbit 10gbit none --reference fp32 fp16 --arms
    auto --rounds 80
paired-far: paired --task large --rates 100mbit --delay 25ms --reference none --arms local3 local4 local5 carried
    chunked1.5 --rounds 12 --steps 29 --models 1
paired-mask: paired --rates 1gbit --world 4 --width 1024 --reference topk-split --arms topk-mask topk-gather --rounds 30
    --models 1
paired-mask-8: paired --rates 1gbit --world 8 --width 1024 --reference topk-split --arms topk-mask topk-gather
    --rounds 24 --models 1
paired-overlap: paired --task residual --rates 64mbit 100mbit --bucket-mb 1 --models 1 --rounds 8 --steps 2 --warmup 3
    --reference qsgd8 --arms qsgd8-overlap chunked25
paired-overlap-transformer: paired --task transformer --rates 64mbit --bucket-mb 1 --models 1 --rounds 8 --steps 2
    --warmup 3 --reference qsgd --arms qsgd-overlap chunked25
paired-coded: paired --rates 100mbit 300mbit 1gbit --width 1024 --reference qsgd --arms qsgd-zstd terngrad
    terngrad-zstd ternary ternary-zstd chunked25 chunked25-zstd --rounds 20 --steps 1 --models 1 --warmup 4
paired-coded-large: paired --task large --rates 100mbit --reference fp16 --arms qsgd qsgd-zstd terngrad terngrad-zstd
    chunked25 chunked25-zstd --rounds 10 --steps 1 --models 1 --warmup 3
paired-tables-2: {zeros} --task tables --world 2 --batch 256 --rounds 6 --steps 1
paired-tables-4: {zeros} --task tables --world 4 --batch 256 --rounds 6 --steps 1
paired-experts-4: {zeros} --task experts --world 4 --batch 16 --rounds 8 --steps 2
pipeline: {stages} --rates 100mbit 300mbit 1gbit
pipeline-4: {stages} --rates 100mbit 1gbit --world 4
pipeline-far: {stages} --rates 100mbit --delay 25ms
pipeline-far-4: {stages} --rates 100mbit --delay 25ms --world 4
paired-head: {head} --rates 1gbit --batch 64 --rounds 3 --steps 1
paired-head-8: {head} --rates 1gbit 10gbit --batch 8 --rounds 5 --steps 1
hsdp: hsdp --rate 1gbit
hsdp-backend: hsdp --rate 1gbit --rounds 5 --arms hsdp-bf16 qsgd8 qsgd backend-qsgd8 backend-qsgd mesh mesh-qsgd8
    mesh-backend-qsgd8
*learn-adamw: {learn} --learning-rates 4e-3 8e-3 --arms float32-b8 chunked25 chunked25-b5 topk1 wide1.5-b5 wide0.7-b5
learn-large-long: learn benchmarks/results/learn.jsonl --task large-bfloat16 --steps 3000 --seeds 1
    --learning-rates 4e-3 --arms chunked25-b5 local3-wide0.7-b8
learn-large-muon: learn benchmarks/results/learn.jsonl --task large-bfloat16 --optimizer muon --steps 3000 --seeds 1
    --learning-rates 8e-3 --arms local5-chunked25
learn-late: {learn} --seeds 1 --learning-rates 8e-3 --arms float32-b8 float32-b5 float32-late3 float32-late3-b5
    chunked25 chunked25-b8 chunked25-b5 chunked25-b3
learn-lead: {learn} --learning-rates 8e-3 1.6e-2 3.2e-2 6.4e-2 --arms chunked25-lead wide1.5-lead
learn-mask: {learn} --learning-rates 8e-3 --arms topk1-exact-b5 topk1-split-b5 topk1-mask-b5 topk2-mask-b5
learn-muon: {learn} --optimizer muon --steps 3000 --learning-rates 8e-3 1.6e-2 --arms local3-qsgd4 local5-chunked25
    local5-wide3
learn-stages: {learn} --learning-rates 8e-3 --arms stages4-q8 stages4-q8-q4 stages4-q6-q4
learn-muon-gradients: {learn} --optimizer muon --steps 1000 --seeds 1 --learning-rates 8e-3 --arms chunked25-b5
    powersgd4 wide0.7-b5 tracking95-ternary
learn-long: {learn} --steps 4500 --learning-rates 4e-3 --arms float32-b8 chunked25-b5 wide0.7-b5
learn-large: {learn} --task large --batch 8 --steps 300 --learning-rates 4e-3 --arms chunked25-b5
learn-periodic: {learn} --steps 4500 --learning-rates 4e-3 8e-3 1.2e-2 --arms local3-wide0.7-b8 local4-wide1.2-b8
    local5-wide1.5-b8
learn-periodic-late: {learn} --steps 4500 --learning-rates 1.2e-2 --seeds 1 --arms local3-wide0.7-b8 local5-wide1.5-b8
    carried3-wide0.9-b8
learn-gpt2: {learn} --task gpt2 --batch 64 --steps 500 --seeds 1 --learning-rates 4e-3 --arms chunked25-b5
    kept1-chunked25 kept5-chunked25 kept5-longer local1 local1-longer local3-longer qsgd4 terngrad eden local5-eden
    eden2 eden2-magnitudes
learn-gpt2-seeds: {learn} --task gpt2 --batch 64 --steps 500 --seeds 3 --learning-rates 4e-3
    --arms kept1-chunked25 kept1-longer eden eden2-magnitudes
learn-gpt2-muon: {learn} --task gpt2 --optimizer muon --batch 64 --steps 500 --seeds 1 --learning-rates 1.6e-2 3.2e-2
    --arms local5-eden
learn-gpt2-rates: {learn} --task gpt2 --batch 64 --steps 250 --seeds 1 --learning-rates 2e-3 4e-3 8e-3
    --arms kept1-chunked25
learn-gpt2-large: {learn} --task gpt2-large --batch 64 --steps 250 --seeds 1 --learning-rates 2e-3 --arms eden
    eden2-magnitudes
learn-gpt2-tiny: {learn} --task gpt2-tiny --batch 256 --steps 250 --seeds 3 --learning-rates 4e-3 --arms chunked25-b5
    kept1-chunked25 local5-chunked25 kept5-chunked25
learn-kept: {learn} --seeds 1 --learning-rates 8e-3 --arms kept1-longer kept5-longer local3-longer terngrad eden
    local5-eden
learn-unbiased: {learn} --learning-rates 8e-3 --arms qsgd8 qsgd4
learn-batch: {learn} --batch 64 --seeds 1 --learning-rates 8e-3 --arms chunked25 local10-ternary
*learn-sgd: {learn} --optimizer sgd --steps 500 --learning-rates 0.3 --arms topk12 topk4-at-once chunked25 eden
learn-sgd-long: {learn} --optimizer sgd --steps 4500 --learning-rates 0.3 --arms topk9-split topk7.5-split
learn-large-sgd: {learn} --task large --optimizer sgd --world 2 --batch 8 --steps 400 --seeds 1 --learning-rates 0.2
    --arms terngrad local10-ternary
*learn-digits: {learn} --task digits --optimizer sgd --batch 64 --steps 220 --arms chunked25 topk4
    onebit dgc-topk1 local2-ternary local10-ternary
*train-digits: train --task digits --world 2 4
*train-small: train --task small --readings 8 --timed 4
train-small-adamw: train --task small --optimizer adamw --rates 100mbit 1gbit --arms powersgd onebit topk topk8
    --readings 8 --timed 4
gpu-rates: step --device cuda --limit bucket --model gpt2 --worlds 2 --rates none 10gbit 25gbit 1gbit --rounds 3
    --steps 2 --warmup 3 --arms fp32 fp16 bf16-hook powersgd qsgd onebit ternary topk chunked auto
*allreduce: allreduce --world 8 --repeats 3
allreduce-bytes: allreduce --world 8 --numel 25600000 --density 0.01 --overlap 0 --arms gather split-k --repeats 2
"""


def publications(text: str) -> tuple[Publication, ...]:
    """The publications of a text like `COMMANDS_OF`. An indented line continues the one before."""
    entries = [line.partition(": ") for line in text.format(**BEGINNINGS).strip().replace("\n    ", " ").splitlines()]
    return tuple(Publication(name.lstrip("*"), command, plot=name.startswith("*")) for name, _, command in entries)


SET = publications(COMMANDS_OF)


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a subcommand and its arguments."""
    parser = argparse.ArgumentParser()
    cli.module(arguments[0]).add_arguments(parser)
    return parser.parse_args(arguments[1:])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = [publication.name for publication in SET]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--tables", action="store_true", help="run nothing, write the tables from what is there")


def run(options: argparse.Namespace) -> int:
    """`gradwire-bench publish`."""
    if not list((ROOT / DOCS).glob(PAGES)):
        raise ValueError(f"{ROOT} has no {DOCS}: publishing takes a clone of the repository, installed with pip -e")
    if not options.tables:
        chosen = [publication for publication in SET if publication.name in options.only]
        make(chosen, links.missing())
    write_pages()
    return 0


def make(publications: Sequence[Publication], no_links: str | None) -> None:
    """Run one after the other, from the root of the clone.

    Raises:
        ValueError: one failed; those after it have run nevertheless.
    """
    begin, failed = time.monotonic(), []
    for publication in publications:
        lacks = "there is no GPU" if publication.gpu and not torch.cuda.is_available() else None
        if "backend" in publication.command and not backend.PYTHON:
            lacks = f"the backend gradwire {backend.NEEDS}"
        if lacks := lacks or (no_links if publication.shaped and not publication.gpu else None):
            print(f"\n{publication.name}: left out, as {lacks}", flush=True)
            continue
        print(f"\n$ gradwire-bench {shlex.join(publication.arguments)}", flush=True)
        started = time.monotonic()
        command = [sys.executable, "-m", "gradwire.benchmarks.cli", *publication.arguments]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            failed.append(publication.name)
        print(f"{publication.name}: {time.monotonic() - started:.0f} s", flush=True)
    print(f"\n{(time.monotonic() - begin) / 60:.0f} minutes for all", flush=True)
    if failed:
        raise ValueError(f"{', '.join(failed)} failed; their figures are the older ones")


def pages() -> dict[Path, str]:
    """The texts of the pages with tables."""
    return {path: path.read_text("utf-8") for path in [*sorted((ROOT / DOCS).glob(PAGES)), ROOT / DOCS / GPU_PAGE]}


def write_pages() -> None:
    """Regenerate every table from the JSON files."""
    for path, text in filled(pages()).items():
        path.write_text(text, "utf-8")


def filled(texts: Mapping[Path, str]) -> dict[Path, str]:
    """Pages whose tables are those of the JSON files.

    Between `<!-- NAME:begin -->` and `<!-- NAME:end -->` stand the command and the tables of the publication NAME.

    Raises:
        ValueError: a publication has no place in the pages, or several.
    """
    texts = dict(texts)
    for publication in SET:
        begin, end = (f"<!-- {publication.name}:{side} -->" for side in ("begin", "end"))
        places = [path for path, text in texts.items() if begin in text and end in text]
        if len(places) != 1:
            raise ValueError(
                f"{DOCS}/{PAGES} have {len(places)} places for {publication.name}: one needs lines {begin} and {end}"
            )
        text = texts[places[0]]
        result = json.loads((ROOT / publication.json).read_text("utf-8")) if publication.there else {}
        block = "\n\n".join(section(publication, result))
        before, _, rest = text.partition(begin)
        texts[places[0]] = f"{before}{begin}\n{block}\n{end}{rest.partition(end)[2]}"
    return texts


def section(publication: Publication, result: Mapping[str, Any]) -> Iterable[str]:
    """The command, its tables, and its picture, in Markdown."""
    yield f"```sh\ngradwire-bench {publication.command}\n```"
    for table in cli.module(publication.arguments[0]).tables(result) if result else ():
        yield markdown(table)
    if publication.plot:
        yield f"![{publication.name}]({publication.name}.png)"


def markdown(table: report.Table) -> str:
    """A table as GitHub shows it, its title above and its caption below."""
    lines = [table.columns, ["---"] + ["--:"] * (len(table.columns) - 1), *table.rows]
    cells = "\n".join(f"| {' | '.join(escaped(cell) for cell in line)} |" for line in lines)
    notes = "\n".join(f"- {escaped(note)}" for note in table.caption.splitlines())
    return f"**{table.title}**\n\n{cells}" + (f"\n\n{notes}" if notes else "")


def escaped(cell: str) -> str:
    return " ".join(cell.split()).replace("|", "\\|")
