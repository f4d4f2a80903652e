"""`regard.train` on one process: resuming, accumulation, refusals, interruption, and what is written."""

import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
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


KILLING = """
import os, random, signal, sys, time
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[1])
from test_loop import run
torch.set_num_threads(1)
out, kills, draws = Path(sys.argv[2]), int(sys.argv[3]), random.Random(3)
log = out / "log.jsonl"
for _ in range(kills):
    written = log.stat().st_mtime_ns if log.exists() else 0
    child = os.fork()
    if child == 0:
        run(out, steps=30 * kills)
        os._exit(0)
    ended = 0
    while not ended and (not log.exists() or log.stat().st_mtime_ns == written):
        time.sleep(0.002)  # until it trains, then somewhere in the next steps
        ended, _ = os.waitpid(child, os.WNOHANG)
    if not ended:
        time.sleep(draws.uniform(0.0, 0.2))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
run(out, steps=30 * kills)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_kills_at_random_moments_lose_nothing(tmp_path):
    """In a process that has imported everything once: each run that is killed is a fork of it."""
    kills = int(os.environ.get("KILLS", "2"))
    command = [sys.executable, "-c", KILLING, str(Path(__file__).parent), str(tmp_path / "a"), str(kills)]
    subprocess.run(command, check=True)
    run(tmp_path / "b", steps=30 * kills)
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


def test_worker_processes_change_no_bit_also_when_the_terminal_interrupts_them(tmp_path, monkeypatch):
    from regard.training.loop import Run

    run(tmp_path / "thread")
    step = Run.step

    def interrupting(self, number, batches):
        step(self, number, batches)
        if number == 2:
            for process in (*multiprocessing.active_children(), multiprocessing.current_process()):
                os.kill(process.pid, signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "step", interrupting)
        assert run(tmp_path / "workers", num_workers=2).steps == 3
    assert run(tmp_path / "workers", num_workers=1).steps == 6
    assert weights(tmp_path / "thread") == weights(tmp_path / "workers")
    assert not multiprocessing.active_children()


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


def test_checkpoint_is_there_before_the_evaluation(tmp_path, monkeypatch):
    def killed(*arguments):
        raise RuntimeError("killed")

    monkeypatch.setattr("regard.training.loop.evaluate", killed)
    with pytest.raises(RuntimeError, match="killed"):
        run(tmp_path, eval_data=[TEXT[:200]], eval_every=4)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-00000002", "step-00000004"]


def test_ctrl_c_finishes_the_step_and_saves(tmp_path):
    from regard.training.loop import Run

    step = Run.step

    def interrupting(self, number, batches):
        step(self, number, batches)
        if number == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "step", interrupting)
        result = run(tmp_path, eval_data=[TEXT[:200]])
    assert result.stopped
    assert result.eval_loss is None  # evaluating may take longer than whoever stops it waits
    assert not any("eval_loss" in line for line in logged(tmp_path))
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


# ------------------------------------------------------------------------------------------------------------- numbers


def plain_loop(model, rows_of_steps, config, after_step=lambda step, model: None) -> list[dict]:
    """The same training, written by hand: a mean loss, torch's clipping, AdamW in two groups."""
    decayed = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    other = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": other, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=config.betas, eps=config.eps)
    lines = []
    for step, input_ids in enumerate(rows_of_steps):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate_at(step)
        optimizer.zero_grad()
        loss = model(input_ids=input_ids, labels=input_ids).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        after_step(step, model)
        lines.append({"loss": loss.item(), "grad_norm": norm.item()})
    return lines


def rows_of(steps: int, batch_size: int, seed: int) -> list[torch.Tensor]:
    from regard.training.data import row_numbers

    rows = regard.recipes.CausalLM(length=32).rows([TEXT], tiny(), training=True)
    numbers = [row_numbers(step, batch_size, len(rows), seed)[0] for step in range(steps)]
    return [torch.stack([rows[int(number)] for number in step]) for step in numbers]


def without_dropout(**values):
    return tiny(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, **values).double()


def test_losses_norms_averages_and_evaluation_are_those_of_a_plain_loop(tmp_path):
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    config = TrainConfig(steps=6, batch_size=4, learning_rate=1e-2, clip=0.5, seed=5, ema=0.8)
    theirs = without_dropout()
    average = AveragedModel(theirs, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    lines = plain_loop(theirs, rows_of(6, 4, 5), config, lambda step, model: average.update_parameters(model))
    model = without_dropout()
    recipe = regard.recipes.CausalLM(length=32)
    options = {"out": tmp_path, "eval_data": [TEXT[:333]], "log_every": 1, "progress": False, "accumulate": 2}
    result = regard.train(model, recipe, [TEXT], config=config, monitor_every=2, **options)
    ours = [line for line in logged(tmp_path) if "loss" in line]
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in ours] == pytest.approx([line[name] for line in lines], rel=1e-6), name
    assert max(line["grad_norm"] for line in ours) > 0.5  # before clipping
    for one, other in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    saved = regard.load(tmp_path / "model").double()
    averaged = average.module
    for one, other in zip(saved.parameters(), averaged.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    # The held-out loss is that of the averaged weights, over all rows, whatever the size of the batches.
    held = recipe.rows([TEXT[:333]], model, training=False)
    rows = torch.stack([held[number] for number in range(len(held))])
    with torch.no_grad():
        expected = averaged.eval()(input_ids=rows, labels=rows).loss.item()
    assert result.eval_loss == pytest.approx(expected, rel=1e-5)
    again = regard.train(without_dropout(), recipe, [TEXT], config=config, **options)
    assert again.eval_loss == pytest.approx(result.eval_loss, rel=1e-9)


def test_dropout_differs_between_steps_and_micro_batches(tmp_path):
    """One row, so that all batches are equal; a learning rate of almost nothing, so that all weights are."""
    model = tiny(resid_pdrop=0.5, embd_pdrop=0.5)
    losses = []

    class Watched(regard.recipes.CausalLM):
        def loss(self, model, batch):
            total, count = super().loss(model, batch)
            losses.append(total.item())
            return total, count

    recipe = Watched(length=32)
    options = {"steps": 3, "batch_size": 4, "accumulate": 2, "learning_rate": 1e-30, "weight_decay": 0.0}
    regard.train(model, recipe, [TEXT[:32]], out=tmp_path, progress=False, **options)
    assert len(set(losses)) == 6


def test_bf16_on_the_cpu_trains_weights_of_fp32(tmp_path):
    result = run(tmp_path, precision="bf16", steps=20, learning_rate=1e-2)
    assert result.loss < logged(tmp_path)[0]["loss"]
    assert regard.load(tmp_path / "model").dtype == torch.float32


def test_logs_have_each_step_once_after_resumes(tmp_path):
    run(tmp_path / "whole", monitor_every=1)
    for number in (1, 3):
        from regard.training.loop import Run

        step = Run.step

        def breaking(self, at, batches, step=step, number=number):
            if at == number:
                raise RuntimeError("killed")
            step(self, at, batches)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Run, "step", breaking)
            with pytest.raises(RuntimeError, match="killed"):
                run(tmp_path / "parts", monitor_every=1)
        with (tmp_path / "parts" / "log.jsonl").open("a") as file:
            file.write('{"step": 2, "lo')  # torn
    run(tmp_path / "parts", monitor_every=1)
    for name, keys in (("log.jsonl", ("step", "loss")), ("monitor.jsonl", ("step", "entropy"))):
        both = [(tmp_path / out / name).read_text().splitlines() for out in ("whole", "parts")]
        whole, parts = ([[json.loads(line)[key] for key in keys] for line in lines] for lines in both)
        assert whole == parts


# -------------------------------------------------------------------------------------------------------------- crashes


def test_two_runs_in_one_directory_at_once_are_refused(tmp_path):
    from regard.training.loop import Run

    step = Run.step
    refused = []

    def again(self, number, batches):
        step(self, number, batches)
        if number == 3:
            with pytest.raises(BlockingIOError, match=str(tmp_path)):
                run(tmp_path)
            refused.append(number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "step", again)
        run(tmp_path)
    assert refused == [3]
    assert run(tmp_path).steps == 6


def test_the_only_good_checkpoint_is_not_deleted_for_a_damaged_later_one(tmp_path):
    run(tmp_path, steps=6, save_every=2, keep=3)
    folder = tmp_path / "checkpoints"
    for step in (4, 6):
        next((folder / f"step-0000000{step}").glob("*.distcp")).unlink()
    from regard.training.loop import Run

    done = Run.step

    def breaking(self, number, batches):
        if number == 3:
            raise RuntimeError("killed")
        done(self, number, batches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "step", breaking)
        with pytest.warns(UserWarning, match="distcp"), pytest.raises(RuntimeError, match="killed"):
            run(tmp_path, steps=6, save_every=1, keep=1)
    with pytest.warns(UserWarning, match="distcp"):
        assert Checkpoints(folder, 1).newest_intact() == 3


def test_a_write_of_run_json_that_was_killed_does_not_make_the_directory_foreign(tmp_path):
    (tmp_path / f".run.json.{'0' * 32}.part").write_text("{")
    assert run(tmp_path).steps == 6


def test_a_log_that_cannot_be_written_is_named(tmp_path):
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    (tmp_path / "run").mkdir()
    run(tmp_path / "run", steps=2)
    (tmp_path / "run" / "log.jsonl").unlink()
    (tmp_path / "run" / "log.jsonl").symlink_to("/dev/full")
    for name in os.listdir(tmp_path / "run" / "checkpoints"):
        os.rename(tmp_path / "run" / "checkpoints" / name, tmp_path / name)
    with pytest.raises(OSError, match=r"log\.jsonl") as error:
        run(tmp_path / "run", steps=2)
    assert error.value.errno == 28


# ---------------------------------------------------------------------------------------------------------- TensorBoard


class Writer:
    """A SummaryWriter that keeps its values."""

    made: list = []  # noqa: RUF012

    def __init__(self, directory, purge_step=None):
        self.directory, self.purge_step, self.values = directory, purge_step, {}
        Writer.made.append(self)

    def add_scalar(self, name, value, step):
        self.values.setdefault(name, []).append((step, value))

    def flush(self):
        pass

    close = flush


def test_tensorboard_gets_the_whole_run(tmp_path, monkeypatch):
    import types

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    monkeypatch.setattr(Writer, "made", [])
    result = run(tmp_path, tensorboard=True, eval_data=[TEXT[:200]], eval_every=3, monitor_every=3)
    writer, attention = Writer.made
    assert writer.directory == str(tmp_path / "tensorboard")
    assert writer.purge_step == 1
    assert set(writer.values) == {"loss", "learning_rate", "grad_norm", "tokens_per_second", "eval_loss"}
    assert writer.values["loss"] == [(line["step"], line["loss"]) for line in logged(tmp_path) if "loss" in line]
    assert writer.values["eval_loss"][-1] == (6, result.eval_loss)
    assert len(attention.values) == 4 * 2 * 2
    assert all([step for step, _ in values] == [3, 6] for values in attention.values.values())


def test_tensorboard_that_is_not_installed_is_told_before_training(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match="tensorboard"):
        run(tmp_path / "run", tensorboard=True)
    assert not (tmp_path / "run").exists()


def test_a_finished_run_says_its_losses_again(tmp_path):
    first, second = run(tmp_path), run(tmp_path)
    assert first.loss is not None
    assert (second.loss, second.eval_loss, second.steps) == (first.loss, first.eval_loss, first.steps)


def test_progress_is_printed_in_korean(tmp_path, capsys):
    run(tmp_path / "a", progress="ko", eval_data=[TEXT[:200]])
    lines = capsys.readouterr().err.splitlines()
    assert any("6/6" in line and "손실" in line for line in lines)
    assert any("평가 손실" in line for line in lines)
    with pytest.raises(ValueError, match="'fr'"):
        run(tmp_path / "b", progress="fr")
    assert not (tmp_path / "b").exists()
