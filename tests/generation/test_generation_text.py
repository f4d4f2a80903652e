"""Text written by a model: defaults and options, prompts of every kind, pieces as they come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from speaking_twins import bart, byte_pairs, framed_byte_pairs, gpt2, llama, pieces, speaking, t5, wordpiece

from regard.generation import loop
from regard.generation.config import GenerationConfig
from regard.generation.loop import GenerationOutput, generate
from regard.models.loading import load

PROMPTS = ["The cat sat", "한국", "it was too tired because"]
QUIET = {"pad_token_id": 0, "eos_token_id": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return gpt2(tmp_path_factory.mktemp("gpt2"), positions=61, generation={"bad_words_ids": [[0]], "eos_token_id": 5})


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load(folder, dtype=torch.float64)


@pytest.fixture(scope="module")
def translator(tmp_path_factory: Any) -> Any:
    return load(t5(tmp_path_factory.mktemp("t5")), dtype=torch.float64)


def told(model: Any, monkeypatch: Any, **values: Any) -> Any:
    """The model, with other words in its generation_config.json."""
    monkeypatch.setattr(loop, "read_optional_json", lambda directory, name, kind: values)
    return model


# ------------------------------------------------------------------------------------------------------------- results


def test_one_prompt_gives_one_result_and_a_list_a_list(model: Any) -> None:
    one = model.generate(PROMPTS[0], max_new_tokens=7)
    assert isinstance(one, GenerationOutput)
    assert one.prompt == PROMPTS[0]
    assert one.ids.shape == (7,)
    assert (one.reason, one.score) == ("length", None)
    assert str(one) == one.text == model.tokenizer.decode(one.ids)
    assert repr(one) == f"GenerationOutput({one.text!r}, 7 tokens, reason='length')"
    several = model.generate(PROMPTS, max_new_tokens=7)
    assert [made.prompt for made in several] == PROMPTS


def test_tokens_are_the_likeliest_one_after_another(model: Any) -> None:
    ids = model.tokenizer.encode(PROMPTS[0]).ids
    start = len(ids)
    for _ in range(7):
        logits = model(torch.tensor([ids])).logits[0, -1]
        logits[0] = -torch.inf
        ids.append(int(logits.argmax()))
    assert model.generate(PROMPTS[0], max_new_tokens=7).ids.tolist() == ids[start:]


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("family", [gpt2, llama, t5, bart], ids=lambda make: make.__name__)
def test_text_is_written_under_autocast(family: Any, beams: int, tmp_path: Path) -> None:
    model = load(family(tmp_path))
    with torch.autocast("cpu", torch.bfloat16):
        made = model.generate(PROMPTS, max_new_tokens=7, num_beams=beams)
        pieces = "".join(model.stream(PROMPTS[0], max_new_tokens=7, num_beams=1))
    assert [len(one.ids) > 0 for one in made] == [True] * 3
    if beams == 1:
        assert made[0].text == pieces


@pytest.mark.parametrize("beams", [1, 3])
def test_prompts_in_a_batch_are_continued_as_alone(model: Any, beams: int) -> None:
    together = model.generate(PROMPTS, max_new_tokens=11, num_beams=beams)
    for made in together:
        alone = model.generate(made.prompt, max_new_tokens=11, num_beams=beams)
        assert (made.text, made.ids.tolist(), made.reason) == (alone.text, alone.ids.tolist(), alone.reason)
    assert (together[0].score is None) == (beams == 1)


def test_encoder_decoder_reads_the_prompt_and_starts_anew(translator: Any) -> None:
    read = translator.tokenizer.encode(PROMPTS[0]).ids
    ids = [0]
    for _ in range(5):
        logits = translator(torch.tensor([read]), decoder_input_ids=torch.tensor([ids])).logits
        ids.append(int(logits[0, -1].argmax()))
    made = translator.generate(PROMPTS, max_new_tokens=5)
    assert made[0].ids.tolist() == ids[1:]
    assert made[1].ids.tolist() == translator.generate(PROMPTS[1], max_new_tokens=5).ids.tolist()


def test_decoder_starts_with_the_token_that_generation_config_names(translator: Any, monkeypatch: Any) -> None:
    usual = translator.generate(PROMPTS[0], max_new_tokens=5).ids.tolist()
    other = told(translator, monkeypatch, decoder_start_token_id=9).generate(PROMPTS[0], max_new_tokens=5).ids.tolist()
    assert usual != other


# ----------------------------------------------------------------------------------------------- options and defaults


def test_checkpoint_is_heard_and_the_caller_wins(model: Any, monkeypatch: Any) -> None:
    plain = model.generate(PROMPTS[0], max_new_tokens=20, repetition_penalty=1.0)
    told(model, monkeypatch, max_new_tokens=9, repetition_penalty=5.0, eos_token_id=5, bad_words_ids=[[0]])
    heard = model.generate(PROMPTS[0])
    assert len(heard.ids) == 9
    assert heard.ids.tolist() != plain.ids[:9].tolist()
    assert model.generate(PROMPTS[0], max_new_tokens=20, repetition_penalty=1.0).ids.tolist() == plain.ids.tolist()


def test_number_of_beams_is_compared_as_the_checkpoint_says(model: Any, monkeypatch: Any) -> None:
    told(model, monkeypatch, num_beams=3, length_penalty=-2.0, early_stopping=True, max_new_tokens=5)

    def searched(**options: Any) -> tuple[Any, ...]:
        config = loop.merged_config(model, GenerationConfig(**options))
        return config.num_beams, config.length_penalty, config.early_stopping

    assert searched() == (3, -2.0, True)
    assert searched(num_beams=2) == (2, -2.0, True)
    assert searched(num_beams=2, length_penalty=1.0, early_stopping=False) == (2, 1.0, False)
    assert model.generate(PROMPTS[0]).score is not None
    assert model.generate(PROMPTS[0], num_beams=1).score is None


@pytest.mark.parametrize(
    ("said", "options", "wanted"),
    [
        ({}, {}, (0.0, None, None, None)),
        ({"do_sample": True}, {}, (1.0, 50, None, None)),
        ({"do_sample": True, "temperature": 0.5, "top_p": 0.25}, {}, (0.5, 50, 0.25, None)),
        ({"do_sample": True, "top_k": 3}, {"temperature": 0.0}, (0.0, None, None, None)),
        ({"temperature": 0.5, "top_k": 3}, {}, (0.0, None, None, None)),
        ({"temperature": 0.5, "top_k": 3}, {"temperature": 0.75}, (0.75, 3, None, None)),
        ({"temperature": 0.5}, {"top_p": 0.25}, (0.5, None, 0.25, None)),
        ({}, {"top_k": 3}, (1.0, 3, None, None)),
        ({}, {"min_p": 0.5}, (1.0, None, None, 0.5)),
        ({}, {"top_k": 0}, (0.0, None, None, None)),
        ({"do_sample": True, "top_k": 3, "min_p": 0.25}, {"top_k": 0, "min_p": 0.0}, (1.0, 0, None, 0.0)),
        ({"do_sample": True}, {"do_sample": False}, (0.0, None, None, None)),
        ({}, {"do_sample": True}, (1.0, None, None, None)),
    ],
)
def test_it_is_sampled_if_either_asks_for_it(said: Any, options: Any, wanted: Any) -> None:
    config = GenerationConfig(**options).over(GenerationConfig.from_files(said, {}))
    assert (config.temperature, config.top_k, config.top_p, config.min_p) == wanted
    assert config.samples == (wanted[0] > 0)


def test_all_that_the_checkpoint_rules_out_is_ruled_out() -> None:
    ruled: dict[str, Any] = {
        "no_repeat_ngram_size": 3,
        "suppress_tokens": (7, 5),
        "min_new_tokens": 2,
        "min_length": 11,
        "forced_bos_token_id": 13,
        "forced_eos_token_id": 17,
        "repetition_penalty": 1.5,
    }
    config = GenerationConfig(seed=3).over(GenerationConfig(**ruled, do_sample=False))
    assert config == GenerationConfig(do_sample=False, temperature=0.0, seed=3, **ruled)


def test_seed_repeats_the_draws_whatever_the_other_rows_are(model: Any) -> None:
    sampled = model.generate(PROMPTS, max_new_tokens=15, temperature=1.5, seed=11)
    assert (
        sampled[0].ids.tolist() == model.generate(PROMPTS[0], max_new_tokens=15, temperature=1.5, seed=11).ids.tolist()
    )
    assert (
        sampled[0].ids.tolist() != model.generate(PROMPTS[0], max_new_tokens=15, temperature=1.5, seed=12).ids.tolist()
    )
    greedy = model.generate(PROMPTS[0], max_new_tokens=15)
    assert model.generate(PROMPTS[0], max_new_tokens=15, top_k=1, seed=3).ids.tolist() == greedy.ids.tolist()


def test_unknown_setting_is_refused_unless_ignored(model: Any, monkeypatch: Any) -> None:
    told(model, monkeypatch, typical_p=0.5)
    with pytest.raises(ValueError, match=r"typical_p.*0\.5"):
        model.generate(PROMPTS[0])
    assert len(model.generate(PROMPTS[0], max_new_tokens=3, ignore=["typical_p"]).ids) == 3


# -------------------------------------------------------------------------------------------------------------- lengths


def test_fifty_tokens_where_nobody_says_and_fewer_where_there_is_no_room(model: Any) -> None:
    assert GenerationConfig().token_limit(3, None) == 50
    prompt = "The cat sat on the mat because it"
    used = len(model.tokenizer.encode(prompt).ids)
    assert len(model.generate(prompt).ids) == 61 - used + 1 < 50  # nobody reads the last one


def test_more_new_tokens_than_there_is_room_are_refused(model: Any) -> None:
    used = len(model.tokenizer.encode(PROMPTS[0]).ids)
    message = f"{used + 60}.*61.*{62 - used}.*{used}"
    with pytest.raises(ValueError, match=message):
        model.generate(PROMPTS[0], max_new_tokens=61)
    with pytest.raises(ValueError, match=message):
        model.stream(PROMPTS[0], max_new_tokens=61)  # at once, not when its first piece is asked for
    assert len(model.generate(PROMPTS[0], max_new_tokens=62 - used).ids) == 62 - used
    with pytest.raises(TypeError, match=r"max_new_tokens.*str.*'3'"):
        model.stream(PROMPTS[0], max_new_tokens="3")


def test_prompt_that_leaves_no_room_names_both_lengths(model: Any) -> None:
    with pytest.raises(ValueError, match=r"\d\d\d.*61"):
        model.generate("고양이 " * 30)


@pytest.mark.parametrize("beams", [1, 3])
def test_prompt_that_takes_all_positions_has_one_token_after_it(model: Any, beams: int) -> None:
    full = "a" * 200
    ids = model.tokenizer.encode(full).ids
    while len(ids) > 61:
        full = full[:-1]
        ids = model.tokenizer.encode(full).ids
    assert len(ids) == 61
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1]
    logits[0] = float("-inf")  # banned by the checkpoint
    for new in (1, None):
        assert model.generate(full, max_new_tokens=new, num_beams=beams).ids.tolist() == [int(logits.argmax())]
    with pytest.raises(ValueError, match=r"62.*61.*1"):
        model.generate(full, max_new_tokens=2, num_beams=beams)


def test_max_length_counts_the_prompt(model: Any, monkeypatch: Any) -> None:
    told(model, monkeypatch, max_length=12)
    used = len(model.tokenizer.encode(PROMPTS[0]).ids)
    assert len(model.generate(PROMPTS[0]).ids) == 12 - used
    with pytest.raises(ValueError, match=r"\d+.*max_length.*12"):
        model.generate("The cat sat on the mat because it was too tired")


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([], ValueError, "list"),
        (7, TypeError, r"str.*int.*7"),
        (["a", b"b"], TypeError, r"str.*list"),
    ],
)
def test_what_is_no_prompt_is_refused(model: Any, prompt: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        model.generate(prompt)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_new_tokens": 0}, ValueError, r"max_new_tokens.*1.*0"),
        ({"temperature": -1.0}, ValueError, r"temperature.*0"),
        ({"temperature": "hot"}, TypeError, r"temperature.*str"),
        ({"top_k": -2}, ValueError, r"top_k.*0.*-2"),
        ({"num_beams": 0}, ValueError, r"num_beams.*1.*0"),
        ({"num_beams": 2, "temperature": 1.0}, ValueError, "num_beams"),
        ({"num_beams": 2, "stop_strings": "x"}, ValueError, r"stop.*num_beams"),
        ({"num_beams": 3, "num_return_sequences": 2}, ValueError, r"num_return_sequences.*2"),
        ({"stop_strings": [""]}, ValueError, r"stop.*string"),
        ({"new_tokens": 3}, TypeError, "new_tokens"),
    ],
)
def test_wishes_out_of_range_are_refused(model: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        model.generate(PROMPTS[0], **options)


@pytest.mark.parametrize(
    ("said", "options", "message"),
    [
        ({"num_beams": 2, "do_sample": True}, {}, r"num_beams.*do_sample.*beams=1.*temperature=0"),
        (
            {"num_beams": 2, "do_sample": True},
            {"top_k": 0},
            r"num_beams.*do_sample.*beams=1.*temperature=0",
        ),
        ({"num_beams": 2}, {"top_p": 0.9}, r"num_beams.*beams=1.*temperature=0"),
        ({"do_sample": True}, {"num_beams": 2}, r"do_sample.*beams=1.*temperature=0"),
        (
            {"num_beams": 2, "stop_strings": "x"},
            {},
            r'num_beams.*stop_strings.*beams=1.*ignore=.*"stop_strings"',
        ),
        ({"num_beams": 2}, {"stop_strings": "x"}, r"num_beams.*beams=1.*stop"),
    ],
)
def test_what_the_checkpoint_asks_for_is_not_put_down_to_the_caller(
    model: Any, said: Any, options: Any, message: str, monkeypatch: Any
) -> None:
    told(model, monkeypatch, **said)
    with pytest.raises(ValueError, match=rf"generation_config\.json.*{message}"):
        model.generate(PROMPTS[0], **options)


def test_remedies_of_what_the_checkpoint_asks_for_work(model: Any, monkeypatch: Any) -> None:
    told(model, monkeypatch, num_beams=2, do_sample=True, max_new_tokens=3)
    for options in ({"num_beams": 1}, {"temperature": 0}):
        assert len(model.generate(PROMPTS[0], **options).ids) == 3
    told(model, monkeypatch, num_beams=2, stop_strings="x", max_new_tokens=3, eos_token_id=999)
    with pytest.raises(ValueError, match=r"generation_config\.json.*eos_token_id.*token.*999.*0"):
        model.stream(PROMPTS[0], num_beams=1)
    assert len(model.generate(PROMPTS[0], ignore=["stop_strings", "eos_token_id"]).ids) == 3


# ----------------------------------------------------------------------------------------------------- text and pieces


def test_empty_prompt_is_the_start_token(model: Any, translator: Any) -> None:
    made = model.generate(["", "a"], max_new_tokens=4)
    ids = torch.tensor([[0]])  # <|endoftext|>
    wanted = generate(
        model,
        ids,
        max_new_tokens=4,
        eos_token_ids=5,
        pad_token_id=0,
        suppress_tokens=(0,),
    )
    assert made[0].ids.tolist() == wanted.ids[0].tolist() == model.generate("", max_new_tokens=4).ids.tolist()
    assert made[1].ids.tolist() == model.generate("a", max_new_tokens=4).ids.tolist()
    assert len(translator.generate("", max_new_tokens=4).ids) == 4


def test_empty_prompt_without_a_start_token_is_refused(model: Any, monkeypatch: Any) -> None:
    from dataclasses import replace

    monkeypatch.setattr(model.tokenizer, "ids_of", replace(model.tokenizer.ids_of, bos=None))
    monkeypatch.setattr(model.config, "values", {**model.config.values, "bos_token_id": None})
    with pytest.raises(ValueError, match="prompt"):
        model.generate("")


def test_end_token_ends_the_text_and_is_no_text(model: Any, monkeypatch: Any) -> None:
    free = model.generate(PROMPTS[0], max_new_tokens=9).ids.tolist()
    told(model, monkeypatch, eos_token_id=[3, free[2]], bad_words_ids=[[0]])
    made = model.generate(PROMPTS[0], max_new_tokens=9)
    first = free.index(free[2])
    assert made.ids.tolist() == free[: first + 1]
    assert made.reason == "eos"
    assert made.text == model.tokenizer.decode(free[:first])


def test_stop_string_ends_the_text_before_it(model: Any) -> None:
    free = model.generate(PROMPTS[0], max_new_tokens=30, temperature=1.0, seed=5).text
    stop = free[7:9]
    made = model.generate(PROMPTS[0], max_new_tokens=30, temperature=1.0, seed=5, stop_strings=["never", stop])
    assert made.text == free[: free.index(stop)]
    assert made.reason == "stop"


@pytest.mark.parametrize(
    "tokenizer",
    [byte_pairs, framed_byte_pairs, lambda: pieces("<unk>", "<s>", "</s>", frame="<s> $A")],
    ids=["bytes", "framed bytes", "pieces"],
)
def test_new_text_is_what_follows_the_prompt_wherever_it_is_cut(tokenizer: Any, tmp_path: Path) -> None:
    def config(vocab_size: int) -> Any:
        return transformers.GPT2Config(vocab_size=vocab_size, n_positions=31, n_embd=8, n_layer=1, n_head=2)

    model = load(speaking(tmp_path, "GPT2LMHeadModel", config, tokenizer()))
    whole = "The animal was 한국 tired, 고양이 cat"
    ids = model.tokenizer.encode(whole, special=False).ids
    assert model.tokenizer.decode(ids) == whole
    cuts = [n for n in range(1, len(ids)) if "\ufffd" not in model.tokenizer.decode(ids[:n])]
    assert len(cuts) > 9
    for n in cuts:
        after = loop._decoder_after(model, torch.tensor([ids[:n]]))
        assert model.tokenizer.decode(ids[:n]) + after(ids[n:]) == whole


@pytest.mark.parametrize("prompt", [PROMPTS[0], PROMPTS[1], ""])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.5, "seed": 7}, {"temperature": 1.5, "seed": 7, "stop_strings": "e"}]
)
def test_pieces_joined_are_the_text_of_generate(model: Any, prompt: str, options: Any) -> None:
    found = list(model.stream(prompt, max_new_tokens=40, **options))
    assert "".join(found) == model.generate(prompt, max_new_tokens=40, **options).text
    assert all(found)
    assert len(found) > 1 or options.get("stop_strings")


def test_encoder_decoder_streams_too(tmp_path: Path) -> None:
    model = load(bart(tmp_path))
    options = {"max_new_tokens": 12, "temperature": 1.0, "seed": 3, "ignore": ["forced_eos_token_id"]}
    assert "".join(model.stream("a cat", **options)) == model.generate("a cat", **options).text != ""


def test_checkpoint_that_asks_for_beams_is_not_streamed_unless_told(model: Any, monkeypatch: Any) -> None:
    told(model, monkeypatch, num_beams=3, max_new_tokens=4)
    with pytest.raises(ValueError, match=r"num_beams=3.*num_beams=1"):
        model.stream(PROMPTS[0])
    assert "".join(model.stream(PROMPTS[0], num_beams=1)) == model.generate(PROMPTS[0], num_beams=1).text


def test_stream_takes_one_prompt(model: Any) -> None:
    with pytest.raises(TypeError, match=r"prompt.*str.*list"):
        model.stream(PROMPTS)


def test_steps_are_told(model: Any) -> None:
    steps: list[int] = []
    model.generate(PROMPTS, max_new_tokens=5, on_token=steps.append)
    assert steps == [1, 2, 3, 4, 5]


def test_rows_beyond_the_tokenizers_vocabulary_are_no_text(tmp_path: Path) -> None:
    def config(vocab_size: int) -> Any:
        return transformers.GPT2Config(
            vocab_size=vocab_size + 997, n_positions=61, n_embd=20, n_layer=2, n_head=5, bos_token_id=0, eos_token_id=0
        )

    model = load(speaking(tmp_path, "GPT2LMHeadModel", config, byte_pairs()))
    made = model.generate(PROMPTS[0], max_new_tokens=20, temperature=1.0, seed=3)
    known = [i for i in made.ids.tolist() if 0 < i < model.tokenizer.size]
    assert len(known) < len(made.ids)
    assert made.text == model.tokenizer.decode(known)


def test_model_without_a_directory_has_only_its_settings(model: Any, monkeypatch: Any) -> None:
    tokenizer = model.tokenizer
    monkeypatch.setattr(model, "directory", None)
    assert model.tokenizer is tokenizer
    assert len(model.generate(PROMPTS[0], max_new_tokens=3).ids) == 3


def test_wordpiece_has_no_end_token_and_runs_to_the_length(tmp_path: Path) -> None:
    def config(vocab_size: int) -> Any:
        return transformers.GPT2Config(vocab_size=vocab_size, n_positions=61, n_embd=20, n_layer=1, n_head=5)

    folder = speaking(tmp_path, "GPT2LMHeadModel", config, wordpiece(), generation={})
    path = folder / "config.json"
    values = json.loads(path.read_text()) | {"eos_token_id": None, "bos_token_id": None}
    path.write_text(json.dumps(values))
    assert load(folder).generate("a cat").reason == "length"


def test_llama_streams_what_it_generates(tmp_path: Path) -> None:
    model = load(llama(tmp_path, generation=QUIET))
    made = "".join(model.stream(PROMPTS[2], max_new_tokens=9, stop_strings="zzz"))
    assert made == model.generate(PROMPTS[2], max_new_tokens=9).text


@pytest.mark.parametrize("off", [{"top_k": 0}, {"top_p": 1.0}, {"top_p": 1}, {"min_p": 0.0}], ids=str)
def test_what_is_switched_off_draws_nothing(model: Any, off: Any) -> None:
    greedy = model.generate(PROMPTS, max_new_tokens=7)
    for seed in (1, 2):
        made = model.generate(PROMPTS, max_new_tokens=7, seed=seed, **off)
        assert [one.ids.tolist() for one in made] == [one.ids.tolist() for one in greedy]
