"""`regard.train` on one process: resuming, accumulation, refusals, interruption, and what is written."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import regard
from regard.training.checkpoints import Checkpoints, damage
from regard.training.config import TrainConfig

TEXT = " ".join(f"word{(n * n) % 17} and {(7 * n) % 11}." for n in range(300))
SIZES = {"n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 32, "vocab_size": 256}
OPTIONS = {
    "steps": 6,
    "batch_size": 4,
    "learning_rate": 1e-3,
    "save_every": 2,
    "log_every": 1,
    "seed": 5,
    "progress": False,
}


def tiny(**values):
    return regard.build("gpt2", **SIZES | values)


def run(out: Path, model=None, **options):
    model = tiny() if model is None else model
    return regard.train(model, regard.recipes.CausalLM(length=32), [TEXT], out=out, **OPTIONS | options)


def weights(out: Path) -> str:
    return hashlib.sha256((out / "model" / "model.safetensors").read_bytes()).hexdigest()


def logged(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def test_what_a_run_writes(tmp_path):
    result = run(tmp_path, eval_data=[TEXT[:200]], eval_every=3)
    assert result.steps == 6
    assert not result.stopped
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "log.jsonl", "model", "run.json"]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-00000004", "step-00000006"]
    lines = logged(tmp_path)
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "eval_loss" in line] == [3, 6]
    assert lines[-1]["eval_loss"] == result.eval_loss
    opened = regard.load(tmp_path / "model")
    assert opened.generate("wor", max_new_tokens=3).text is not None
    import transformers

    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "model")
    ids = torch.arange(20)[None]
    torch.testing.assert_close(theirs(ids).logits, opened(ids).logits)


def test_a_run_learns(tmp_path):
    result = run(tmp_path, steps=60, learning_rate=1e-2, warmup=5)
    assert result.loss < 0.6 * logged(tmp_path)[0]["loss"]


def test_an_interrupted_run_ends_in_the_same_bits(tmp_path):
    """Stopped after some steps by an exception in the middle of one, then resumed."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(whole, tiny(attn_pdrop=0.1), ema=0.9)
    from regard.training.loop import Run

    step = Run.step

    def breaking(self, number, batches):
        step(self, number, batches)
        if number == 4 and not (parts / "broken").exists():
            (parts / "broken").touch()
            raise RuntimeError("killed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "step", breaking)
        with pytest.raises(RuntimeError, match="killed"):
            run(parts, tiny(attn_pdrop=0.1), ema=0.9)
        (parts / "broken").unlink()
    assert Checkpoints(parts / "checkpoints", 2).newest_intact() == 4
    result = run(parts, tiny(attn_pdrop=0.1), ema=0.9)
    assert result.steps == 6
    assert weights(parts) == weights(whole)
    assert [line["loss"] for line in logged(parts)] == [line["loss"] for line in logged(whole)]


def test_kills_at_random_moments_lose_nothing(tmp_path):
    script = (
        "import sys, pathlib, torch; sys.path.insert(0, sys.argv[2]); torch.set_num_threads(1)\n"
        "from test_loop import run\nrun(pathlib.Path(sys.argv[1]), steps=30)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "a"), str(Path(__file__).parent)]
    draws = random.Random(3)
    for _ in range(int(os.environ.get("KILLS", "2"))):
        process = subprocess.Popen(command)
        folder = tmp_path / "a" / "checkpoints"
        while process.poll() is None and not (folder.is_dir() and os.listdir(folder)):
            time.sleep(0.01)  # until it writes, then somewhere in the next steps
        try:
            process.wait(draws.uniform(0.0, 0.3))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for name in ("a", "b"):  # here, which saves two starts of torch
        run(tmp_path / name, steps=30)
    assert weights(tmp_path / "a") == weights(tmp_path / "b")


def test_accumulation_changes_nothing_but_rounding(tmp_path):
    texts = [TEXT[: 40 + 13 * n] for n in range(9)]
    models = []
    for accumulate in (1, 4):
        model = regard.build(
            "bert", task="text-classification", vocab_size=256, hidden_size=16, num_hidden_layers=1,
            num_attention_heads=2, intermediate_size=16, max_position_embeddings=200, type_vocab_size=2,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        ).double()  # fmt: skip
        recipe = regard.recipes.TextClassification(labels=("a", "b"), length=150)
        rows = [{"text": text, "label": n % 2} for n, text in enumerate(texts)]
        options = OPTIONS | {"batch_size": 8, "accumulate": accumulate}
        regard.train(model, recipe, rows, out=tmp_path / str(accumulate), **options)
        models.append(model)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_recomputing_changes_no_bit(tmp_path):
    run(tmp_path / "plain")
    run(tmp_path / "recomputed", recompute=True)
    assert weights(tmp_path / "plain") == weights(tmp_path / "recomputed")


def test_monitoring_changes_no_bit(tmp_path):
    run(tmp_path / "plain", tiny(attn_pdrop=0.1))
    run(tmp_path / "watched", tiny(attn_pdrop=0.1), monitor_every=2)
    assert weights(tmp_path / "plain") == weights(tmp_path / "watched")
    lines = [json.loads(line) for line in (tmp_path / "watched" / "monitor.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert len(lines[0]["entropy"]) == 2
    assert len(lines[0]["entropy"][0]) == 2


@pytest.mark.parametrize(
    ("option", "values"),
    [({"seed": 6}, ("5", "6")), ({"batch_size": 2}, ("4", "2")), ({"learning_rate": 0.5}, ("0.001", "0.5"))],
)
def test_another_run_in_the_same_directory_is_refused_with_both_values(tmp_path, option, values):
    run(tmp_path, steps=2)
    before = weights(tmp_path)
    with pytest.raises(FileExistsError) as error:
        run(tmp_path, steps=2, **option)
    assert all(value in str(error.value) for value in (*option, *values))
    assert weights(tmp_path) == before


def test_other_data_and_another_recipe_are_refused(tmp_path):
    run(tmp_path, steps=2)
    with pytest.raises(FileExistsError, match="data"):
        regard.train(tiny(), regard.recipes.CausalLM(length=32), [TEXT + "!"], out=tmp_path, **OPTIONS | {"steps": 2})
    with pytest.raises(FileExistsError, match="length"):
        regard.train(tiny(), regard.recipes.CausalLM(length=16), [TEXT], out=tmp_path, **OPTIONS | {"steps": 2})


def test_a_directory_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("irreplaceable")
    with pytest.raises(FileExistsError):
        run(tmp_path)
    assert os.listdir(tmp_path) == ["thesis.txt"]
    with pytest.raises(NotADirectoryError):
        run(tmp_path / "thesis.txt")


def test_bookkeeping_may_change_on_resuming(tmp_path):
    run(tmp_path, steps=2)
    result = run(tmp_path, steps=2, save_every=1, log_every=2, keep=1)
    assert result.steps == 2


def test_every_truncation_of_a_checkpoint_is_detected(tmp_path):
    run(tmp_path, steps=4)
    newest = tmp_path / "checkpoints" / "step-00000004"
    for path in sorted(newest.iterdir()):
        content = path.read_bytes()
        for size in {0, 1, len(content) // 2, len(content) - 1}:
            path.write_bytes(content[:size])
            assert damage(newest) is not None, (path.name, size)
        path.unlink()
        assert damage(newest) is not None
        path.write_bytes(content)
    assert damage(newest) is None


def test_a_torn_checkpoint_is_skipped_with_a_message(tmp_path):
    run(tmp_path / "a", steps=4)
    run(tmp_path / "b", steps=4)
    torn = next((tmp_path / "b" / "checkpoints" / "step-00000004").glob("*.distcp"))
    torn.write_bytes(torn.read_bytes()[:-1])
    with pytest.warns(UserWarning, match=f"step-00000004.*{torn.name}"):
        run(tmp_path / "b", steps=4)
    assert weights(tmp_path / "a") == weights(tmp_path / "b")


def test_a_loss_that_is_not_finite_stops_the_run_and_names_its_rows(tmp_path):
    model = tiny()
    with torch.no_grad():
        model.tower.norm.weight[0] = float("inf")
    with pytest.raises(FloatingPointError, match=r"step 1 .*\[\d+, \d+, \d+, \d+\]"):
        run(tmp_path, model)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    ("texts", "message"),
    [([""], "0 tokens"), (["short"], "5 tokens.*32"), ([], "no text")],
    ids=["empty", "short", "none"],
)
def test_data_that_makes_no_block_is_refused(tmp_path, texts, message):
    with pytest.raises(ValueError, match=message):
        regard.train(tiny(), regard.recipes.CausalLM(length=32), texts, out=tmp_path / "run", **OPTIONS)
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_that_does_not_fit_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"256.*100"):
        run(tmp_path / "run", tiny(vocab_size=100))


def test_ctrl_c_finishes_the_step_and_saves(tmp_path):
    from regard.training.loop import Run

    step = Run.step

    def interrupting(self, number, batches):
        step(self, number, batches)
        if number == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "step", interrupting)
        result = run(tmp_path)
    assert result.stopped
    assert result.steps == 3
    assert not (tmp_path / "model").exists()
    assert run(tmp_path).steps == 6
    run(tmp_path / "whole")
    assert weights(tmp_path) == weights(tmp_path / "whole")


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0}, {"batch_size": 3, "accumulate": 2}, {"learning_rate": 0.0}, {"learning_rate": float("nan")},
        {"schedule": "sine"}, {"schedule": "inverse-sqrt"}, {"warmup": 7}, {"clip": -1}, {"ema": 2.0},
        {"betas": (1, 0)}, {"precision": "fp8"}, {"seed": -1}, {"tensor_parallel": 0},
    ],
)  # fmt: skip
def test_options_out_of_range_are_refused_by_name(wrong):
    with pytest.raises((ValueError, TypeError), match=next(iter(wrong))):
        TrainConfig(**{"steps": 6} | wrong)


def test_unknown_options_are_refused_with_those_there_are(tmp_path):
    with pytest.raises(TypeError, match=r"lr.*learning_rate"):
        run(tmp_path, lr=1.0)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "inverse-sqrt", "constant"])
def test_schedules_rise_then_fall(schedule):
    config = TrainConfig(steps=100, warmup=10, learning_rate=2.0, schedule=schedule)
    rates = [config.learning_rate_at(step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * n for n in range(1, 11)])
    assert max(rates) == 2.0
    assert all(one >= other for one, other in pairwise(rates[9:]))
    last = {"cosine": 0.2, "linear": 0.2, "inverse-sqrt": 2 * 0.1**0.5, "constant": 2.0}[schedule]
    assert rates[-1] == pytest.approx(last)
