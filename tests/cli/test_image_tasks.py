"""The command line's pictures: classify, caption, answer, match, features. What they print is what the models say."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from seeing_twins import NAMES, blip, clip, dinov2, idefics, llava, picture, vit
from speaking_twins import bert, gpt2

import regard
from regard.cli.inputs import read_images


@pytest.fixture(autouse=True)
def pictures(plain: None) -> None:
    """Two of them, in a folder of its own."""
    for number, name in enumerate(("photo.png", "other.png")):
        Image.fromarray(picture(number, 37 + 4 * number, 53)).save(name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Callable[..., str]:
    """A function that makes a twin once, and gives its directory."""
    made: dict[Any, str] = {}

    def folder(make: Any, *arguments: Any) -> str:
        key = make, *arguments
        if key not in made:
            made[key] = str(make(tmp_path_factory.mktemp(make.__name__), *arguments))
        return made[key]

    return folder


def piped(monkeypatch: Any, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


# ------------------------------------------------------------------------------------------------------------ classify


def test_classify_prints_every_label_of_one_picture_and_the_best_of_several(run: Any, folder: Any) -> None:
    model = regard.load(folder(vit))
    one, two = (model.classify(name) for name in ("photo.png", "other.png"))
    lines = run("classify", "photo.png", "--model", folder(vit)).splitlines()
    assert lines[0].split() == ["label", "probability"]
    assert lines[2].split() == [one.best[0], f"{float(one.probabilities.max()):.4f}"]
    assert len(lines) == 5
    Path("list.txt").write_text("other.png\n\n")
    several = run("classify", "photo.png", "--file", "list.txt", "--model", folder(vit), "--lang", "ko").splitlines()
    assert several[0].split() == ["이미지", "레이블", "확률"]
    assert [line.split() for line in several[2:]] == [
        [name, found.best[0], f"{float(found.probabilities.max()):.4f}"]
        for name, found in (("photo.png", one), ("other.png", two))
    ]


def test_classify_as_json_has_every_label(run: Any, folder: Any) -> None:
    found = json.loads(run("classify", "photo.png", "--model", folder(vit), "--json"))
    said = regard.load(folder(vit)).classify("photo.png")
    assert (found["model"], found["labels"]) == (folder(vit), list(NAMES.values()))
    (one,) = found["images"]
    assert (one["image"], one["label"]) == ("photo.png", said.best[0])
    assert one["probability"] == dict(zip(said.labels, said.probabilities[0].tolist(), strict=True))


def test_classify_reads_a_picture_from_standard_input(run: Any, folder: Any, monkeypatch: Any) -> None:
    piped(monkeypatch, Path("photo.png").read_bytes())
    found = json.loads(run("classify", "-", "--model", folder(vit), "--json"))
    said = regard.load(folder(vit)).classify("photo.png")
    assert [one["image"] for one in found["images"]] == ["-"]
    assert found["images"][0]["label"] == said.best[0]


@pytest.mark.parametrize("make", [(clip,), (blip, "Model")], ids=["clip", "blip"])
def test_classify_compares_with_labels_that_are_given(run: Any, folder: Any, make: Any) -> None:
    command = ["classify", "photo.png", "--model", folder(*make), "--labels", "a cat, 고양이"]
    model = regard.load(folder(*make))
    said = model.classify("photo.png", labels=["a cat", "고양이"])
    assert json.loads(run(*command, "--json"))["images"][0]["probability"] == dict(
        zip(said.labels, said.probabilities[0].tolist(), strict=True)
    )
    other = model.classify("photo.png", labels=["a cat", "고양이"], prompt="the {}")
    lines = run(*command, "--prompt", "the {}").splitlines()
    assert lines[2].split()[-1] == f"{float(other.probabilities.max()):.4f}"


def test_classify_lists_the_likeliest_of_many_labels(run: Any, tmp_path: Path) -> None:
    many = str(vit(tmp_path / "many", "ForImageClassification", id2label={n: f"thing{n}" for n in range(37)}))
    lines = run("classify", "photo.png", "--model", many).splitlines()
    assert len(lines) == 2 + 10 + 1
    assert lines[-1] == "… 27 more; --json has all"
    assert "… 27개 더" in run("classify", "photo.png", "--model", many, "--lang", "ko")


# ------------------------------------------------------------------------------------------------------------- caption


def test_caption_prints_a_line_for_each_picture(run: Any, folder: Any) -> None:
    where = folder(blip, "ForConditionalGeneration")
    made = regard.load(where).caption(["photo.png", "other.png"], max_new_tokens=7)
    lines = run("caption", "photo.png", "other.png", "--model", where, "--max-new-tokens", "7").splitlines()
    assert lines == [" ".join(one.text.split()) for one in made]
    begun = regard.load(where).caption("other.png", "the cat", max_new_tokens=5, num_beams=3)
    command = [
        "caption",
        "other.png",
        "--model",
        where,
        "--max-new-tokens",
        "5",
        "--num-beams",
        "3",
        "--prompt",
        "the cat",
    ]
    assert run(*command) == " ".join(("the cat" + begun.text).split()) + "\n"


def test_caption_as_json_has_ids_and_reasons(run: Any, folder: Any) -> None:
    for where in (folder(blip, "ForConditionalGeneration"), folder(llava), folder(idefics)):
        found = json.loads(run("caption", "photo.png", "--model", where, "--max-new-tokens", "3", "--json"))
        made = regard.load(where).caption("photo.png", max_new_tokens=3)
        assert found == {
            "model": where,
            "captions": [
                {
                    "image": "photo.png",
                    "prompt": made.prompt,
                    "text": made.text,
                    "ids": made.ids.tolist(),
                    "reason": made.reason,
                    "score": None,
                    "passes": 3,
                }
            ],
        }


@pytest.mark.parametrize(
    "make", [(blip, "ForConditionalGeneration"), (llava,), (idefics,)], ids=["blip", "llava", "idefics"]
)
def test_a_placeholder_is_a_prompt_to_those_who_read_one_and_a_text_to_blip(run: Any, folder: Any, make: Any) -> None:
    where = folder(*make)
    said = run("caption", "photo.png", "--model", where, "--prompt", "a <image> cat", "--max-new-tokens", "3")
    text = regard.load(where).caption("photo.png", "a <image> cat", max_new_tokens=3).text
    begun = "a <image> cat" if make[0] is blip else ""
    assert said == " ".join((begun + text).split()) + "\n"


@pytest.mark.parametrize(
    ("words", "make"),
    [
        (["caption", "photo.png"], (blip, "ForConditionalGeneration")),
        (["answer", "photo.png", "was it?"], (blip, "ForQuestionAnswering")),
    ],
)
def test_captions_and_answers_end_before_a_stop_string(run: Any, folder: Any, words: list[str], make: Any) -> None:
    command = [*words, "--model", folder(*make), "--max-new-tokens", "9", "--json"]
    (whole,) = json.loads(run(*command)).popitem()[1]
    stop = whole["text"][len(whole["text"]) // 2 :][:2]
    (found,) = json.loads(run(*command, "--stop", "no such words", "--stop", stop)).popitem()[1]
    assert (found["text"], found["reason"]) == (whole["text"][: whole["text"].index(stop)], "stop")


@pytest.mark.parametrize("words", [["caption"], ["answer"]])
def test_what_is_written_is_printed_before_the_rest_is(folder: Any, monkeypatch: Any, capsys: Any, words: Any) -> None:
    """Control-C in a long list keeps what was printed, and --json is whole or nothing."""
    from regard.cli import main
    from regard.tasks import vision

    where = folder(llava)
    several = ["photo.png"] * 11 if words == ["caption"] else ["photo.png", *["was it?"] * 11]
    runs, usual = [], vision.continue_prompts

    def interrupted(*given: Any) -> Any:
        runs.append(1)
        if len(runs) % 2 == 0:
            raise KeyboardInterrupt
        return usual(*given)

    monkeypatch.setattr(vision, "continue_prompts", interrupted)
    command = [*words, *several, "--model", where, "--max-new-tokens", "3"]
    assert main(command) == 130
    assert len(capsys.readouterr().out.splitlines()) == 8
    assert main([*command, "--json"]) == 130
    assert capsys.readouterr().out == ""


def test_pictures_are_checked_before_the_model_is_loaded(fail: Any, monkeypatch: Any) -> None:
    from regard.models import loading

    monkeypatch.setattr(loading, "load", None)
    Path("bad.jpg").write_text("no picture")
    several = ["photo.png", "other.png", "bad.jpg"]
    assert re.search(r"image.*2.*bad\.jpg", fail("caption", *several, "--model", "nowhere"))
    assert "bad.jpg" in fail("answer", "bad.jpg", "a?", "--model", "nowhere")
    assert "bad.jpg" in fail("generate", "<image>", "--image", "bad.jpg", "--model", "nowhere")


def test_a_bar_on_the_terminal_leaves_captions_on_standard_output(folder: Any, monkeypatch: Any, capsys: Any) -> None:
    from regard.cli import main

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    where = folder(blip, "ForConditionalGeneration")
    assert main(["caption", *["photo.png"] * 11, "--model", where, "--max-new-tokens", "3"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 11


# ------------------------------------------------------------------------------------------------------------ generate


@pytest.mark.parametrize("make", [llava, idefics])
def test_generate_writes_about_several_pictures(run: Any, folder: Any, make: Any, monkeypatch: Any) -> None:
    where, prompt = folder(make), "<image> is wide, <image> the cat"
    wanted = regard.load(where).generate(prompt, images=["photo.png", "other.png"], max_new_tokens=7)
    command = ["generate", prompt, "--model", where, "--max-new-tokens", "7", "--image", "photo.png", "--image"]
    assert run(*command, "other.png") == wanted.text + "\n"
    (found,) = json.loads(run(*command, "other.png", "--json"))["texts"]
    assert (found["prompt"], found["ids"]) == (prompt, wanted.ids.tolist())
    piped(monkeypatch, Path("other.png").read_bytes())
    assert run(*command, "-") == wanted.text + "\n"
    several = run(*command, "other.png", "--num-beams", "3")
    assert several == regard.load(where).generate(
        prompt, images=["photo.png", "other.png"], max_new_tokens=7, num_beams=3
    ).text + "\n"  # fmt: skip


def test_captions_are_drawn_again_with_the_same_seed(run: Any, folder: Any) -> None:
    where = folder(blip, "ForConditionalGeneration")
    options = ["--temperature", "1.5", "--top-k", "11", "--top-p", "0.9", "--seed", "3", "--max-new-tokens", "9"]
    made = regard.load(where).caption("photo.png", temperature=1.5, top_k=11, top_p=0.9, seed=3, max_new_tokens=9)
    assert run("caption", "photo.png", "--model", where, *options) == " ".join(made.text.split()) + "\n"


def test_keys_of_the_files_can_be_ignored(run: Any, fail: Any, tmp_path: Path) -> None:
    where = blip(tmp_path / "blip", "ForConditionalGeneration")
    (where / "generation_config.json").write_text('{"typical_p": 0.5}')
    file = where / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"do_sharpen": True}))
    command = ["caption", "photo.png", "--model", str(where), "--max-new-tokens", "3"]
    assert re.search(r"typical_p.*0\.5", fail(*command))
    assert re.search(r"do_sharpen.*True", fail(*command, "--ignore", "typical_p"))
    assert run(*command, "--ignore", "typical_p", "--ignore", "do_sharpen").endswith("\n")


# -------------------------------------------------------------------------------------------------------------- answer


@pytest.mark.parametrize(("make", "arguments"), [(blip, ("ForQuestionAnswering",)), (llava, ()), (idefics, ())])
def test_answer_prints_a_line_for_each_question(run: Any, folder: Any, make: Any, arguments: Any) -> None:
    where = folder(make, *arguments)
    questions = ["was it tired?", "what sat?"]
    made = regard.load(where).answer(["photo.png"] * 2, questions, max_new_tokens=6)
    command = ["answer", "photo.png", *questions, "--model", where, "--max-new-tokens", "6"]
    assert run(*command) == "".join(" ".join(one.text.split()) + "\n" for one in made)
    found = json.loads(run(*command, "--json"))
    assert (found["model"], found["image"]) == (where, "photo.png")
    assert [one["question"] for one in found["answers"]] == questions
    assert [one["ids"] for one in found["answers"]] == [one.ids.tolist() for one in made]
    assert [one["prompt"] for one in found["answers"]] == [one.prompt for one in made]


# --------------------------------------------------------------------------------------------------------------- match


@pytest.mark.parametrize(
    ("make", "arguments", "measure", "korean"),
    [(clip, (), "cosine", "코사인"), (blip, ("ForImageTextRetrieval",), "probability", "확률")],
)
def test_match_prints_texts_the_best_first(
    run: Any, folder: Any, make: Any, arguments: Any, measure: str, korean: str
) -> None:
    where = folder(make, *arguments)
    texts = ["a cat", "the street", "it was"]
    values = regard.load(where).match("photo.png", texts).values[0]
    lines = run("match", "photo.png", *texts, "--model", where).splitlines()
    assert lines[0].split() == ["text", measure]
    assert [line.split() for line in lines[2:]] == [
        [*texts[n].split(), f"{float(values[n]):.4f}"] for n in values.argsort(descending=True).tolist()
    ]
    assert run("match", "photo.png", *texts, "--model", where, "--lang", "ko").split()[:2] == ["텍스트", korean]
    found = json.loads(run("match", "photo.png", *texts, "--model", where, "--json"))
    assert (found["measure"], found["best"]) == (measure, texts[int(values.argmax())])
    assert found["texts"] == [{"text": text, measure: v} for text, v in zip(texts, values.tolist(), strict=True)]


def test_match_truncates_if_asked(run: Any, fail: Any, folder: Any) -> None:
    command = ["match", "photo.png", "cat " * 40, "--model", folder(clip)]
    assert re.search(r"31.*truncate=True", fail(*command))
    assert "cat cat" in run(*command, "--truncate")


# ------------------------------------------------------------------------------------------------------------ features


def test_features_are_described_and_written(run: Any, folder: Any) -> None:
    where = folder(dinov2)
    found = regard.load(where).features("photo.png")
    lines = run("features", "photo.png", "--model", where, "--out", "new/map.npy").splitlines()
    assert lines == [
        "photo.png: 37 × 53, resized to 30 × 42 pixels",
        "tokens: 38, vector size: 20",
        "map: 5 rows, 7 columns",
        "Map: new/map.npy",
    ]
    assert np.array_equal(np.load("new/map.npy"), found.map.numpy())
    assert run("features", "photo.png", "--model", where, "--lang", "ko").splitlines() == [
        "photo.png: 37 × 53, 모델 입력 30 × 42픽셀",
        "토큰 38개, 벡터 크기 20",
        "맵: 5행 7열",
    ]


def test_features_as_json_have_every_number(run: Any, folder: Any) -> None:
    where = folder(vit, "Model")
    said = json.loads(run("features", "photo.png", "--model", where, "--layer", "2", "--json"))
    found = regard.load(where).features("photo.png", layer=2)
    assert said["map"] == found.map.tolist()
    assert (said["cls"], said["pooled"], said["layer"]) == (found.cls.tolist(), None, 2)
    assert (said["size"], said["pixels"], said["grid"]) == ([37, 53], [30, 30], [5, 5])
    assert (said["scale"], said["corner"]) == (list(found.frame.scale), [0.0, 0.0])
    last = json.loads(run("features", "photo.png", "--model", where, "--json", "--out", "x.npy"))
    assert (last["map"], last["layer"]) == ("x.npy", None)
    assert last["pooled"] == regard.load(where).features("photo.png").pooled.tolist()


@pytest.mark.parametrize(
    ("make", "arguments"),
    [(vit, ()), (clip, ()), (blip, ("ForQuestionAnswering",)), (llava, ())],
)
def test_features_of_every_head_are_shown(run: Any, folder: Any, make: Any, arguments: Any) -> None:
    assert "vector size: 20" in run("features", "other.png", "--model", folder(make, *arguments))


def test_features_in_bfloat16_are_written_as_float32(run: Any, folder: Any) -> None:
    run("features", "photo.png", "--model", folder(vit), "--dtype", "bfloat16", "--out", "x.npy")
    assert np.load("x.npy").dtype == np.float32


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["classify", "--model", "VIT"], r"'-'.*--file"),
        (["classify", "none.png", "--model", "VIT"], r"'none\.png'"),
        (
            ["classify", "photo.png", "other.txt", "--model", "VIT"],
            r"image.*1.*other\.txt",
        ),
        (["classify", "-", "-", "--model", "VIT"], "'-'"),
        (
            ["classify", "photo.png", "--model", "CLIP"],
            r"CLIP.*labels=.*'a cat'",
        ),
        (
            ["classify", "photo.png", "--model", "CLIP", "--labels", "a,,b"],
            "--labels",
        ),
        (
            ["classify", "photo.png", "--model", "CLIP", "--labels", "a", "--prompt", "b"],
            "prompt",
        ),
        (["classify", "photo.png", "--model", "VIT", "--truncate"], r"classify.*ViT"),
        (
            ["classify", "photo.png", "--model", "VIT", "--labels", "a,b"],
            r"--labels.*CLIP.*BLIP.*ViT.*'image-classification'",
        ),
        (
            ["classify", "photo.png", "--model", "VITBODY", "--labels", "a,b"],
            r"--labels.*CLIP.*BLIP.*ViT",
        ),
        (
            ["classify", "photo.png", "--model", "MATCH", "--labels", "a,b"],
            r"--labels.*CLIP.*BLIP.*'image-text-matching'",
        ),
        (
            ["classify", "a", "--model", "BERT", "--labels", "a,b"],
            r"--labels.*CLIP.*BLIP.*BERT.*'text-classification'",
        ),
        (
            ["classify", "a", "--model", "BERT", "--prompt", "a"],
            r"classify.*BERT",
        ),
        (["caption", "--model", "CAPTION"], r"'-'.*--file"),
        (["caption", "photo.png"], r"'--model'.*'regard caption --help'"),
        (
            ["caption", "photo.png", "--model", "VIT"],
            r"caption.*ViT",
        ),
        (["caption", "photo.png", "--model", "GPT2"], r"caption.*GPT-2"),
        (["caption", "photo.png", "--model", "CAPTION", "--max-new-tokens", "0"], r"new_tokens.*1.*0"),
        (["caption", "photo.png", "--model", "CAPTION", "--lang", "fr"], r"--lang.*'fr'"),
        (["caption", "photo.png", "--model", "CAPTION", "--dtype", "int8"], r"--dtype.*float64.*float32"),
        (["caption", "photo.png", "--model", "CAPTION", "--seed", "3"], r"--seed.*3"),
        (["answer", "photo.png", "--model", "CAPTION"], "'QUESTION'"),
        (
            ["answer", "photo.png", "a?", "--model", "ANSWER", "--seed", "3"],
            r"--seed.*3",
        ),
        (["answer", "photo.png", "a?", "--model", "BERT"], r"answer.*BERT"),
        (
            ["answer", "photo.png", "a?", "--model", "VIT"],
            r"answer.*ViT",
        ),
        (
            ["generate", "<image> a", "--image", "photo.png", "--model", "GPT2"],
            r"--image.*LLaVA.*Idefics.*GPT-2",
        ),
        (
            ["generate", "<image>", "<image>", "--image", "photo.png", "--model", "LLAVA"],
            r"--image.*2",
        ),
        (
            ["generate", "-", "--image", "-", "--model", "LLAVA"],
            "'-'",
        ),
        (
            ["generate", "a", "--image", "photo.png", "--model", "LLAVA"],
            "'<image>'",
        ),
        (["match", "photo.png", "--model", "CLIP"], "'TEXT'"),
        (
            ["match", "photo.png", "a", "--model", "VITBODY"],
            r"match.*zero-shot-image-classification.*ViT",
        ),
        (["match", "photo.png", "a", "--model", "BERT"], r"match.*BERT"),
        (["features", "photo.png", "--model", "BERT"], r"features.*BERT"),
        (
            ["features", "photo.png", "--model", "VIT", "--out", "x.npz"],
            r"--out.*'x\.npz'.*\.npy",
        ),
        (
            ["features", "photo.png", "--model", "VIT", "--layer", "4"],
            r"layer.*0.*3",
        ),
        (["features", "folder", "--model", "VIT"], "folder"),
        (["features", "cut.png", "--model", "VIT"], r"cut\.png"),
        (
            ["features", "https://a.b/c.jpg", "--model", "VIT"],
            r"https://a\.b/c\.jpg",
        ),
    ],
)
def test_wrong_input_is_told_in_one_line(
    fail: Any, folder: Any, tmp_path_factory: Any, arguments: list[str], message: str
) -> None:
    Path("folder").mkdir()
    Path("other.txt").write_text("no picture")
    Path("cut.png").write_bytes(Path("photo.png").read_bytes()[:200])
    models = {
        "VIT": (vit,),
        "VITBODY": (vit, "Model"),
        "CLIP": (clip,),
        "CAPTION": (blip, "ForConditionalGeneration"),
        "ANSWER": (blip, "ForQuestionAnswering"),
        "MATCH": (blip, "ForImageTextRetrieval"),
        "GPT2": (gpt2,),
        "LLAVA": (llava,),
        "BERT": (bert, "ForQuestionAnswering" if arguments[0] == "answer" else "ForSequenceClassification"),
    }
    said = fail(*[folder(*models[word]) if word in models else word for word in arguments])
    assert re.search(message, said)


def test_a_model_that_does_not_say_how_it_wants_pictures_is_told_in_one_line(fail: Any, tmp_path: Path) -> None:
    where = vit(tmp_path / "vit")
    (where / "preprocessor_config.json").unlink()
    assert re.search(r"model\.preprocessor.*ImageProcessor\.of", fail("classify", "photo.png", "--model", str(where)))


@pytest.mark.parametrize("words", [["match", "photo.png", "a cat"], ["features", "photo.png"], ["look", "photo.png"]])
def test_keys_are_ignored_as_the_error_says(run: Any, fail: Any, tmp_path: Path, words: list[str]) -> None:
    where = clip(tmp_path / "odd") if words[0] == "match" else vit(tmp_path / "odd")
    values = json.loads((where / "config.json").read_text())
    (where / "config.json").write_text(json.dumps(values | {"odd_key": True}))
    assert re.search(r"--ignore.*odd_key", fail(*words, "--model", str(where)))
    assert run(*words, "--model", str(where), "--ignore", "odd_key")


def test_missing_pillow_is_named_with_the_command_that_installs_it(fail: Any, folder: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    said = fail("features", "photo.png", "--model", folder(vit), code=1)
    assert "'regard[models]'" in said


def test_pictures_are_read_from_a_file_of_paths_and_from_standard_input(monkeypatch: Any) -> None:
    Path("list.txt").write_text("a.jpg\n  \nb.jpg\n")
    piped(monkeypatch, b"\x89PNG")
    assert read_images(["x.png", "-"], Path("list.txt")) == ["x.png", b"\x89PNG", "a.jpg", "b.jpg"]


def test_other_dtypes_are_taken(run: Any, folder: Any) -> None:
    wanted = regard.load(folder(vit), dtype=torch.float64).classify("photo.png").probabilities[0].tolist()
    found = json.loads(run("classify", "photo.png", "--model", folder(vit), "--dtype", "float64", "--json"))
    assert list(found["images"][0]["probability"].values()) == wanted
