"""Lightning, Accelerate and Transformers' Trainer: what others have written, changed by three lines at most, trains on
two ranks with compressed gradients, is killed, and goes on; the account is kept from below (`trained.py`)."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import types
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from ranks import Pool
from trained import Account, changed, executed, source, surroundings

CODECS = {
    "Identity": "gradwire.CompressState(gradwire.Identity(), fallback=None)",
    "OneBit": "gradwire.CompressState(gradwire.OneBit(block=256), fallback=None, exchange='two_pass')",
    "TopK": "gradwire.CompressState(gradwire.TopK(density=0.05), fallback=None, exchange='gather')",
}
#: Optimizer steps in a run, after how many of them its checkpoint is written, and when it is killed.
STEPS, SAVED, KILLED = 8, 4, 6


def begin_accelerate() -> None:
    """Its state is the process's; a script expects a process of its own."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [package for package in packages if find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


# -- Lightning ---------------------------------------------------------------------------------------------------------


def lightning(codec: str | None, resume: bool) -> None:
    """Lightning's own demo, a language model; clipped, accumulated, and saved on the way."""
    from lightning.pytorch import Trainer, seed_everything
    from lightning.pytorch.callbacks import ModelCheckpoint

    text = source("lightning", "pytorch/demos/transformer.py")
    if codec is not None:
        text = changed(
            text,
            ("import torch.nn as nn\n", "import torch.nn as nn\nimport gradwire.trainers\n"),
            (
                "    def configure_optimizers(self)",
                "    def configure_callbacks(self):\n"
                f"        return [gradwire.trainers.LightningCallback({CODECS[codec]})]\n"
                "    def configure_optimizers(self)",
            ),
        )
    words = random.Random(1).choices([f"word{i}" for i in range(40)], k=35 * 60)
    Path("data").mkdir(exist_ok=True)
    Path("data/wikitext-2.txt").write_text(" ".join(words) + "\n", "utf-8")
    seed_everything(5, verbose=False)
    model = executed(text, "demo")["LightningTransformer"](vocab_size=41)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=STEPS, accumulate_grad_batches=2, gradient_clip_val=0.5,
        callbacks=[ModelCheckpoint(dirpath=".", filename="{step}", every_n_train_steps=SAVED, save_top_k=-1)],
        logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, ckpt_path=f"step={SAVED}.ckpt" if resume else None)


# -- Accelerate --------------------------------------------------------------------------------------------------------


def accelerate(codec: str | None, resume: bool) -> None:
    """Accelerate's own test of checkpoints, which ends where it has resumed; here it goes on. What it would download is
    made here: data, tokenizer, metric, and a model of the same architecture."""
    import torch
    from transformers import BatchEncoding, BertConfig, BertForSequenceClassification

    class Data:
        def __init__(self, length: int, seed: int) -> None:
            draw = random.Random(seed)
            self.rows = [
                {"input_ids": [draw.randrange(50) for _ in range(12)], "labels": draw.randrange(2)}
                for _ in range(length)
            ]

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, index: int) -> Any:
            return self.rows[index]

    class Datasets(dict[str, Data]):
        def map(self, *args: Any, **options: Any) -> Datasets:
            return self

        rename_column = map

    class Tokenizer:
        @staticmethod
        def from_pretrained(name: str) -> Any:
            return Tokenizer()

        def pad(self, rows: Any, **options: Any) -> BatchEncoding:
            return BatchEncoding({key: torch.tensor([row[key] for row in rows]) for key in rows[0]})

    class Model:
        @staticmethod
        def from_pretrained(name: str, **options: Any) -> Any:
            config = BertConfig(
                vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
            )
            return BertForSequenceClassification(config)

    class Metric:
        def __init__(self) -> None:
            self.right: list[float] = []

        def add_batch(self, predictions: Any, references: Any) -> None:
            self.right += (predictions == references).float().tolist()

        def compute(self) -> dict[str, float]:
            right, self.right = self.right, []
            return {"accuracy": sum(right) / len(right)}

    given = {name: types.ModuleType(name) for name in ("datasets", "evaluate")}
    given["datasets"].load_dataset = lambda *args: Datasets(train=Data(128, 1), validation=Data(64, 2))  # type: ignore
    given["evaluate"].load = lambda *args: Metric()  # type: ignore[attr-defined]
    text = source("accelerate", "test_utils/scripts/external_deps/test_checkpointing.py")
    changes = [("            return\n\n    # Now we train", "            pass\n\n    # Now we train")]
    if codec is not None:
        registers = f"    gradwire.trainers.register_with_accelerator(accelerator, model, {CODECS[codec]})\n"
        changes += [
            ("import evaluate\n", "import evaluate\nimport gradwire.trainers\n"),
            (
                "    # We need to keep track of how many total",
                f"{registers}    # We need to keep track of how many total",
            ),
        ]
    begin_accelerate()
    script = executed(changed(text, *changes), "test_checkpointing", given)
    script["AutoModelForSequenceClassification"], script["AutoTokenizer"] = Model, Tokenizer
    sys.argv = ["test_checkpointing.py", *(["--resume_from_checkpoint", "./epoch_0"] if resume else [])]
    script["main"]()


# -- Transformers ------------------------------------------------------------------------------------------------------


def transformers(codec: str | None, resume: bool) -> None:
    """The Trainer as it comes, with a model of its library's."""
    import gradwire
    import torch
    from gradwire.trainers import TransformersCallback
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

    begin_accelerate()
    set_seed(5)
    draw = torch.Generator().manual_seed(1)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(50, (160, 12), generator=draw)]
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    args = TrainingArguments(
        "out", max_steps=STEPS, per_device_train_batch_size=4, gradient_accumulation_steps=2, save_steps=SAVED,
        use_cpu=True, report_to=[], disable_tqdm=True, learning_rate=1e-3, logging_steps=2, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=rows)
    if codec is not None:
        trainer.add_callback(TransformersCallback(trainer, eval(CODECS[codec], {"gradwire": gradwire})))
    trainer.train(resume_from_checkpoint=f"out/checkpoint-{SAVED}" if resume else None)


# -- on every rank -----------------------------------------------------------------------------------------------------


def ran(rank: int, framework: str, codec: str | None, folder: str, resume: bool, kill_at: int | None = None) -> Any:
    run: Callable[[str | None, bool], None] = globals()[framework]
    with surroundings(rank, folder), Account(kill_at) as account:
        run(codec, resume)
        compressed = codec is not None
        assert (account.state is not None) == compressed
        return account.digests, account.carried(saved=not resume), account.error() if compressed else 0.0


@pytest.fixture
def two(ranks: Callable[[int], Pool]) -> Pool:
    """Those in which `tests/project/test_docs.py` has imported the trainers, if it is this worker that has run it."""
    return ranks(2)


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Up to the rounding of float32."""
    return left.keys() == right.keys() and all(
        abs(left[name] - right[name]).max() <= 1e-6 * abs(right[name]).max() for name in left
    )


LIGHTNING = pytest.param("lightning", marks=needs("lightning"))
ACCELERATE = pytest.param("accelerate", marks=needs("accelerate", "transformers"))
TRANSFORMERS = pytest.param("transformers", marks=needs("accelerate", "transformers"))
SOME = [(None, False), ("Identity", False), ("TopK", False), ("TopK", True)]
ALL = [(codec, resume) for codec in (None, *CODECS) for resume in (False, True)]


@pytest.mark.parametrize("framework", [LIGHTNING, ACCELERATE, TRANSFORMERS])
@pytest.mark.parametrize("cases", [SOME, pytest.param(ALL, marks=pytest.mark.slow)], ids=["some", "all"])
def test_it_trains_and_resumes(two: Pool, tmp_path: Path, framework: str, cases: list[tuple[str | None, bool]]) -> None:
    """Identity equals the run without gradwire, bit for bit, also after a resume; what the others leave out is kept,
    and comes out after the resume."""
    runs, kept = {}, {}
    for codec, resume in cases:
        folder = tmp_path / str(codec)
        folder.mkdir(exist_ok=True)
        (digests, carried, error), (others, *_) = two.run(ran, framework, codec, str(folder), resume)
        assert digests == others, "replicas differ"
        assert len(digests) == (STEPS - SAVED if resume else STEPS)
        assert error < 1e-5
        runs[codec, resume], kept[codec, resume] = digests, carried
        if codec in ("OneBit", "TopK"):
            assert sum(abs(mean).sum() for mean in carried.values()) > 0
    for codec, resume in cases:
        if resume:
            assert same(kept[codec, True], kept[codec, False]), "the checkpoint did not bring what had been kept"
        equal = runs[codec, resume] == runs.get((None, resume), [])
        assert equal == (codec in (None, "Identity") and (None, resume) in runs)
        # Lightning does not restore the random state that dropout has, and has the mean of what the ranks kept.
        # Accelerate's script evaluates once more when it resumes, which also draws.
        if resume and framework == "transformers":
            assert runs[codec, True] == runs[codec, False][SAVED:], "going on after a resume is not going on"


@pytest.mark.parametrize(
    "framework",
    [pytest.param(name, marks=[needs(name), pytest.mark.slow]) for name in ("lightning", "transformers")]
    + [ACCELERATE],
)
def test_it_is_killed_and_goes_on(two: Pool, tmp_path: Path, framework: str) -> None:
    """SIGKILL, two steps after the checkpoint: what was kept then is there."""
    codec = "OneBit" if framework == "transformers" else "TopK"
    doomed = Pool(2)
    results = doomed.run(ran, framework, codec, str(tmp_path), False, KILLED, may_die=(0, 1))
    doomed.close()
    assert results == [None, None]
    (digests, carried, error), (others, *_) = two.run(ran, framework, codec, str(tmp_path), True)
    assert digests == others
    assert len(digests) == STEPS - SAVED
    assert error < 1e-5
    (tmp_path / "again").mkdir()
    (_, kept, _), _ = two.run(ran, framework, codec, str(tmp_path / "again"), False)
    assert same(carried, kept), "the checkpoint did not bring what had been kept"


# -- their own tests, and their slots ----------------------------------------------------------------------------------


def own_test(rank: int, folder: str, name: str) -> str:
    """One of Accelerate's own test scripts, on compressed gradients; what is said where they differ too much."""
    import contextlib
    import io
    from unittest.mock import patch

    import numpy as np
    from torch.nn.parallel import DistributedDataParallel

    registers = (
        "gradwire.trainers.register_with_accelerator(accelerator, {}, gradwire.CompressState({}, fallback=None))\n"
    )
    changes = {
        "test_ddp_comm_hook.py": [
            ("import torch\n", "import torch, gradwire.trainers\n"),
            ("        comm_hook=comm_hook,\n", "        comm_hook=DDPCommunicationHookType.NO,\n"),
            (
                "(MockModel())\n",
                "(MockModel())\n    " + registers.format("model", "gradwire.Cast(torch.float16)"),
            ),
        ],
        "test_sync.py": [
            ("import torch\n", "import torch, gradwire.trainers\n"),
            (
                "(ddp_model, ddp_opt, ddp_sched, dataloader)\n",
                "(ddp_model, ddp_opt, ddp_sched, dataloader)\n        "
                + registers.format("ddp_model", "gradwire.Identity()"),
            ),
            (
                "(ddp_model, dataloader)\n",
                "(ddp_model, dataloader)\n        " + registers.format("ddp_model", "gradwire.Identity()"),
            ),
        ],
    }[name]
    text = changed(source("accelerate", f"test_utils/scripts/{name}"), *changes)
    make, rng = DistributedDataParallel.__init__, np.random.default_rng

    def on_cpus(self: Any, module: Any, **options: Any) -> None:
        """It is for GPUs, and names one."""
        make(self, module, **options | {"device_ids": None, "output_device": None})

    said = io.StringIO()
    with surroundings(rank, folder), Account() as account, contextlib.redirect_stdout(said):
        begin_accelerate()
        on_cpu = patch.object(DistributedDataParallel, "__init__", on_cpus)
        # Its data are other ones each time, and sometimes such that gradients cancel and rounding is seen.
        with on_cpu, patch.object(np.random, "default_rng", lambda seed=None: rng(seed or 7)):
            executed(text, name)["main"]()
        assert account.wanted
    return said.getvalue()


@needs("accelerate")
def test_accelerates_own_tests_of_hooks_and_accumulation(two: Pool, tmp_path: Path) -> None:
    """With gradwire's hook in the place of PyTorch's, and of none. Lightning's package has no tests."""
    for name, words, times in (("test_ddp_comm_hook.py", "Test DDP comm hook", 10), ("test_sync.py", "**Test", 4)):
        for said in two.run(own_test, str(tmp_path), name):
            assert said.count(words) in (times, 0 if name == "test_sync.py" else times), said


def in_the_middle(rank: int, folder: str) -> tuple[bool, list[str]]:
    """Saved between two optimizer steps, of a model that was registered twice: going on and loading are the same."""
    import torch
    from accelerate import Accelerator
    from gradwire import CompressState, TopK
    from gradwire.trainers import register_with_accelerator
    from training import batch, digest, perceptron

    with surroundings(rank, folder):
        begin_accelerate()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
        model = perceptron()
        inner = model
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        state = CompressState(TopK(0.05), exchange="gather", fallback=None)
        for _ in range(2):
            register_with_accelerator(accelerator, model, state)

        def train(steps: range) -> str:
            for step in steps:
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch(rank, step, inner)).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
            return digest(inner.parameters())

        train(range(6))
        accelerator.save_state("middle")
        expected = train(range(6, 12))
        accelerator.load_state("middle")
        return train(range(6, 12)) == expected, sorted(p.name for p in Path("middle").glob("gradwire*"))


@needs("accelerate")
def test_accelerate_saves_a_state_once(two: Pool, tmp_path: Path) -> None:
    files = ["gradwire_0_of_2.pt", "gradwire_1_of_2.pt"]
    for same_again, names in two.run(in_the_middle, str(tmp_path)):
        assert same_again
        assert set(names) <= set(files)  # the other rank's may yet be written
        assert names


def slots(rank: int, folder: str) -> Any:
    """What Lightning does with `DDPStrategy(ddp_comm_state=…)`, on CUDA only; and Fabric."""
    from unittest.mock import PropertyMock, patch

    import torch
    from gradwire import CompressState, Identity, TopK, compress_hook
    from gradwire.trainers import register_hook
    from lightning.fabric import Fabric
    from lightning.pytorch.strategies import DDPStrategy
    from torch.nn.parallel import DistributedDataParallel
    from training import batch, perceptron, train

    with surroundings(rank, folder), Account() as account:
        state = CompressState(TopK(density=0.05), fallback=None)
        strategy = DDPStrategy(ddp_comm_state=state, ddp_comm_hook=compress_hook)
        strategy.model = ddp = DistributedDataParallel(perceptron())
        with patch.object(DDPStrategy, "root_device", PropertyMock(return_value=torch.device("cuda"))):
            strategy._register_ddp_hooks()
        digests = train(rank, ddp, range(3))
        error = account.error()
    with surroundings(rank, folder), Account() as account:
        fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
        fabric.launch()
        model = perceptron()
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        state = CompressState(Identity(), fallback=None)
        for _ in range(2):
            register_hook(model, state)
        for step in range(3):
            optimizer.zero_grad()
            fabric.backward(model(batch(rank, step, model)).square().mean())
            optimizer.step()
        text = ""
        try:
            register_hook(model, CompressState(Identity()))
        except RuntimeError as problem:
            text = str(problem)
        return digests, error, account.digests, account.error(), text


@needs("lightning")
def test_lightnings_slot_and_fabric(two: Pool, tmp_path: Path) -> None:
    first, second = two.run(slots, str(tmp_path))
    assert first == second
    digests, error, others, nothing, text = first
    assert len(digests) == len(others) == 3
    assert error < 1e-5
    assert nothing < 1e-6
    assert "has a communication hook already, compress_hook" in text


# -- checkpoints that have crossed a run without compression -----------------------------------------------------------


def crossed(rank: int, folder: str) -> tuple[bool, bool, list[str]]:
    """A run on one rank between two others, which has no DDP model; and one that knew nothing of gradwire."""
    import warnings

    import torch.distributed as dist
    from gradwire import CompressState, TopK
    from gradwire.trainers import LightningCallback
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    def callback() -> LightningCallback:
        return LightningCallback(CompressState(TopK(0.1), fallback=None, exchange="gather"))

    def fit(steps: int, *callbacks: LightningCallback, **options: Any) -> Trainer:
        trainer = Trainer(
            accelerator="cpu", devices=2, strategy="ddp", max_steps=steps, callbacks=[*callbacks], logger=False,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(BoringModel(), **options)
        return trainer

    with surroundings(rank, folder):
        first, idle = callback(), callback()
        nothing = idle.state_dict() == {}
        fit(2, first)
        saved = first.state_dict()
        idle.load_state_dict(saved)
        fit(1).save_checkpoint("without.ckpt")
        dist.barrier()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            fit(2, callback(), ckpt_path="without.ckpt")
    return nothing, idle.state_dict() == saved, [str(w.message) for w in seen if "gradwire" in str(w.message)]


@needs("lightning")
def test_lightning_keeps_what_it_does_not_use_and_says_what_is_not_there(two: Pool, tmp_path: Path) -> None:
    for nothing, kept, [told] in two.run(crossed, str(tmp_path)):
        assert nothing
        assert kept, "forgotten on one rank"
        assert "has nothing of gradwire's: it goes on without residuals" in told


def frozen(rank: int, folder: str) -> list[str]:
    """What each of the three says when a layer has been frozen since the checkpoint, strictly and not."""
    import warnings

    import torch
    from accelerate import Accelerator
    from gradwire import CompressState, TopK
    from gradwire.trainers import (
        LightningCallback,
        TransformersCallback,
        files,
        register_hook,
        register_with_accelerator,
    )
    from torch.nn.parallel import DistributedDataParallel
    from training import batch, perceptron
    from transformers import TrainerState

    def make() -> CompressState:
        return CompressState(TopK(0.05), exchange="gather", fallback=None)

    model = perceptron()
    with surroundings(rank, folder):
        begin_accelerate()
        accelerator = Accelerator(cpu=True)
        ddp, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        trained = make()
        register_with_accelerator(accelerator, ddp, trained)
        accelerator.backward(ddp(batch(rank, 0, model)).square().mean())
        accelerator.save_state("whole")
        files.save(trained, "whole")
        whole = trained.consolidated_state_dict()
        if rank == 0:
            TrainerState().save_to_json("whole/trainer_state.json")
        torch.distributed.barrier()
        next(iter(model.parameters())).requires_grad_(False)
        found = []
        for strict in (True, False):

            def by_lightning(strict: bool = strict) -> None:
                callback = LightningCallback(make(), strict=strict)
                callback.load_state_dict(whole)
                register_hook(DistributedDataParallel(model), callback.state)

            def by_accelerate(strict: bool = strict) -> None:
                begin_accelerate()
                accelerator = Accelerator(cpu=True)
                again, _ = accelerator.prepare(model, optimizer)
                register_with_accelerator(accelerator, again, make(), strict=strict)
                accelerator.load_state("whole")

            def by_transformers(strict: bool = strict) -> None:
                callback = TransformersCallback(None, make(), "whole", strict=strict)  # type: ignore[arg-type]
                callback._resume(types.SimpleNamespace(resume_from_checkpoint=None), TrainerState())  # type: ignore[arg-type]
                register_hook(DistributedDataParallel(model), callback.state)

            for load in (by_lightning, by_accelerate, by_transformers):
                with warnings.catch_warnings(record=True) as seen:
                    warnings.simplefilter("always")
                    try:
                        load()
                        found.append(next(str(w.message) for w in seen if "are dropped" in str(w.message)))
                    except ValueError as error:
                        found.append(str(error))
        return found


@needs("lightning", "accelerate", "transformers")
def test_what_was_kept_of_a_layer_that_is_frozen_now_can_be_dropped(two: Pool, tmp_path: Path) -> None:
    for found in two.run(frozen, str(tmp_path)):
        assert all("the checkpoint is of another model" in text for text in found)
        assert ["are dropped" in text for text in found] == [False] * 3 + [True] * 3


def small_gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"vocab_size": 50, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def small_run(output: str, steps: int) -> dict[str, Any]:
    """Arguments of a Trainer."""
    import torch
    from transformers import TrainingArguments

    args = TrainingArguments(
        output, max_steps=steps, per_device_train_batch_size=4, save_steps=2, use_cpu=True, report_to=[],
        disable_tqdm=True, ddp_find_unused_parameters=False, dataloader_pin_memory=False,
    )  # fmt: skip
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(50, (32, 8))]
    return {"args": args, "train_dataset": rows}


def searched(rank: int, folder: str) -> Any:
    """Two trials of a hyperparameter search, alike; the second's model is a new one."""
    import torch.distributed as dist
    from gradwire import CompressState, TopK
    from gradwire.trainers import TransformersCallback
    from training import digest, residuals_of
    from transformers import Trainer

    class Searching(Trainer):
        """As `hyperparameter_search` has it, whose backends are not installed."""

        number = 0

        def _hp_search_setup(self, trial: Any) -> None:
            self._trial: Any = self.number
            self.create_accelerator_and_postprocess()

        def _get_output_dir(self, trial: Any) -> str:
            return f"{self.args.output_dir}/run-{trial}"

    with surroundings(rank, folder):
        begin_accelerate()
        trainer = Searching(model_init=small_gpt2, **small_run("out", 3))
        state = CompressState(TopK(0.1), exchange="gather", fallback=None)
        trainer.add_callback(TransformersCallback(trainer, state))
        ends = []
        for trainer.number in range(2):
            trainer.train()
            assert trainer.model is not None
            ends.append(
                (state.step, digest(trainer.model.parameters()), digest(residuals_of(state.state_dict()).values()))
            )
        dist.barrier()
        return ends, sorted(str(path) for path in Path().rglob("gradwire_0*"))


@needs("accelerate", "transformers")
def test_trials_of_a_search_have_nothing_of_each_other(two: Pool, tmp_path: Path) -> None:
    for (first, second), files in two.run(searched, str(tmp_path)):
        assert first == second
        assert files == [f"out/run-{trial}/checkpoint-{step}/gradwire_0_of_2.pt" for trial in (0, 1) for step in (2, 3)]


def resumed_elsewhere(rank: int, folder: str) -> list[bool]:
    """A run goes on from a checkpoint in another folder: where another run has one of the same step, and where there is
    none. Whether it ends where it would have."""
    import torch.distributed as dist
    from gradwire import CompressState, TopK
    from gradwire.trainers import TransformersCallback
    from training import digest
    from transformers import Trainer, set_seed

    def trained(output: str, seed: int, **options: Any) -> str:
        begin_accelerate()
        set_seed(seed)
        trainer = Trainer(small_gpt2(), **small_run(output, 4))
        state = CompressState(TopK(0.1), exchange="gather", fallback=None)
        trainer.add_callback(TransformersCallback(trainer, state))
        trainer.train(**options)
        dist.barrier()
        assert trainer.model is not None
        return digest(trainer.model.parameters())

    with surroundings(rank, folder):
        whole = trained("first", seed=1)
        trained("second", seed=2)
        checkpoint = {"resume_from_checkpoint": "first/checkpoint-2"}
        return [trained(output, seed=1, **checkpoint) == whole for output in ("second", "third")]


@needs("accelerate", "transformers")
def test_a_resumed_run_takes_the_checkpoint_that_it_was_given(two: Pool, tmp_path: Path) -> None:
    for same_again in two.run(resumed_elsewhere, str(tmp_path)):
        assert same_again == [True, True]


# -- examples ----------------------------------------------------------------------------------------------------------

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "trainers"
RESUMES = {
    "lightning": ["--epochs=3", "--resume=checkpoints/last.ckpt"],
    "accelerate": ["--epochs=3", "--resume=checkpoints/epoch-1"],
    "transformers": ["--steps=60", "--resume=checkpoints/checkpoint-40"],
}


def example(rank: int, framework: str, folder: str, arguments: list[str]) -> str:
    import contextlib
    import io
    import runpy

    said = io.StringIO()
    with surroundings(rank, folder), contextlib.redirect_stdout(said):
        begin_accelerate()
        sys.argv = [f"train_{framework}.py", *arguments]
        runpy.run_path(str(EXAMPLES / sys.argv[0]), run_name="__main__")
    return said.getvalue()


def check_example(first: str, resumed: str) -> None:
    [*_, (begin, _)], [*_, (end, steps)] = (
        re.findall(r"([\d.]+) after (\d+) steps", said) for said in (first, resumed)
    )
    assert float(end) < 0.95 * float(begin), "it does not go on to learn"
    assert steps in ("96", "60"), "the resume does not know of the steps before"
    for said in (first, resumed):
        [(sent, dense)] = re.findall(r"(\d+) bytes sent where float32 has (\d+)", said)
        assert 5 * int(sent) < int(dense)  # by whatever exchange is fastest at the time


@pytest.mark.parametrize(
    "framework", [pytest.param("lightning", marks=[needs("lightning"), pytest.mark.slow]), ACCELERATE, TRANSFORMERS]
)
def test_examples_learn_and_resume(two: Pool, tmp_path: Path, framework: str) -> None:
    said = [two.run(example, framework, str(tmp_path), arguments)[0] for arguments in ([], RESUMES[framework])]
    check_example(*said)


@pytest.mark.slow
@pytest.mark.parametrize("framework", [LIGHTNING, ACCELERATE, TRANSFORMERS])
def test_examples_run_under_torchrun(tmp_path: Path, framework: str) -> None:
    said = []
    for arguments in ([], RESUMES[framework]):
        script = EXAMPLES / f"train_{framework}.py"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [*command, *arguments], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        said.append(done.stdout)
    check_example(*said)
    assert f"torchrun --standalone --nproc-per-node 2 {script.name}\n" in script.read_text("utf-8")


@pytest.mark.parametrize("framework", ["lightning", "accelerate", "transformers"])
def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, framework: str) -> None:
    import gradwire.trainers

    [name] = [name for name, module in gradwire.trainers._MODULES.items() if module == framework]
    monkeypatch.delitem(sys.modules, f"gradwire.trainers.{framework}", raising=False)
    for module in {framework, *(module for module in sys.modules if module.split(".")[0] == framework)}:
        monkeypatch.setitem(sys.modules, module, None)  # an earlier test may have imported some
    with pytest.raises(ModuleNotFoundError, match=rf"{name} needs {framework}: pip install 'gradwire\[{framework}\]'"):
        getattr(gradwire.trainers, name)


def test_importing_gradwire_imports_no_trainer() -> None:
    text = "import sys, gradwire.trainers; print({'lightning', 'accelerate', 'transformers'} & set(sys.modules))"
    command = [sys.executable, "-c", text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
