"""Prompts continued together: each as it is alone, whatever room the others have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from speaking_twins import gpt2, t5

from regard.generation import loop
from regard.generation.config import GenerationConfig
from regard.generation.loop import GenerationOutput, PromptBatch, StepCounter, token_limits
from regard.models.loading import load

LONG = "The cat sat on the mat because it was too tired"
PROMPTS = ["The cat", LONG, "a", "The cat sat on the mat because it"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Any:
    return load(gpt2(tmp_path_factory.mktemp("gpt2"), positions=61), dtype=torch.float64)


def told(model: Any, monkeypatch: Any, **values: Any) -> None:
    """Other words in its generation_config.json."""
    monkeypatch.setattr(loop, "read_optional_json", lambda directory, name, kind: values)


def facts(made: list[GenerationOutput]) -> list[Any]:
    return [(one.prompt, one.text, one.ids.tolist(), one.reason) for one in made]


SAID = {
    "nothing": {},
    "max_length": {"max_length": 53},
    "max_length of all positions": {"max_length": 61},
    "max_length and a forced end": {"max_length": 53, "forced_eos_token_id": 7},
    "stop strings": {"max_length": 53, "stop_strings": ["c"]},
    "an end token": {"max_length": 57, "eos_token_id": list(range(5, 300, 31))},
}


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"temperature": 3.0, "seed": 11}], ids=["greedy", "beams", "drawn"]
)
@pytest.mark.parametrize("said", SAID)
def test_prompts_of_unlike_length_are_continued_as_alone(model: Any, monkeypatch: Any, said: str, options: Any) -> None:
    if said == "stop strings" and "num_beams" in options:
        pytest.skip("beams with stop strings are not offered")
    told(model, monkeypatch, **{"eos_token_id": None, "pad_token_id": 0, **SAID[said]})
    if "seed" in options:  # draws go by the place in the list: the prompt stands where it stood, among short ones
        alone = [
            model.generate([prompt if n == place else "a" for n in range(4)], **options)[place]
            for place, prompt in enumerate(PROMPTS)
        ]
    else:
        alone = [model.generate(prompt, **options) for prompt in PROMPTS]
    assert facts(model.generate(PROMPTS, **options)) == facts(alone)
    if said == "nothing" and not options:
        assert [len(one.ids) for one in alone][::2] == [50, 50]
        assert len(alone[1].ids) < len(alone[3].ids) < 50


def test_draws_without_a_seed_are_one_draw_however_often_a_prompt_is_run(model: Any, monkeypatch: Any) -> None:
    """A text that is written again with more room begins as it did: else those that ended early would be kept, and the
    others drawn anew."""
    told(model, monkeypatch, eos_token_id=None, pad_token_id=0)
    torch.manual_seed(3)
    together = model.generate(["The cat", LONG], temperature=3.0)
    torch.manual_seed(3)
    short = model.generate(["The cat", LONG], temperature=3.0, max_new_tokens=5)
    assert [one.ids[:5].tolist() for one in together] == [one.ids.tolist() for one in short]


def test_new_tokens_that_one_prompt_has_no_room_for_name_it(model: Any, monkeypatch: Any) -> None:
    used = len(model.tokenizer.encode(LONG).ids)
    message = rf"1.*{used + 49}.*61.*{62 - used}"
    with pytest.raises(ValueError, match=message):
        model.generate(PROMPTS, max_new_tokens=50)
    assert [len(one.ids) for one in model.generate(["The cat", "a"], max_new_tokens=50)] == [50, 50]
    with pytest.raises(ValueError, match=r"2.*\d\d\d.*61"):
        model.generate(["a", LONG, "고양이 " * 30])
    with pytest.raises(ValueError, match="63"):  # which holds for both
        model.generate(["a", "a"], max_new_tokens=63)
    with pytest.raises(ValueError, match=r"max_new_tokens.*1.*0"):
        model.generate(PROMPTS, max_new_tokens=0)
    told(model, monkeypatch, max_length=12)
    with pytest.raises(ValueError, match=rf"1.*{used}.*max_length"):
        model.generate(PROMPTS)


def test_the_empty_one_of_several_prompts_is_named(model: Any, monkeypatch: Any) -> None:
    from dataclasses import replace

    monkeypatch.setattr(model.tokenizer, "ids_of", replace(model.tokenizer.ids_of, bos=None))
    monkeypatch.setattr(model.config, "values", {**model.config.values, "bos_token_id": None})
    with pytest.raises(ValueError, match=r"prompt.*1"):
        model.generate(["a", ""])


def test_steps_of_all_runs_are_counted(model: Any, monkeypatch: Any) -> None:
    told(model, monkeypatch, eos_token_id=None, pad_token_id=0)
    counted: list[int] = []
    made = model.generate(["The cat", LONG], on_token=counted.append)
    together = len(made[1].ids)  # as long as both have room, then the first again
    assert counted == list(range(1, together + 50 + 1))
    one: list[int] = []
    told(model, monkeypatch, max_length=40, eos_token_id=None, pad_token_id=0)
    model.generate(["The cat", LONG], on_token=one.append)
    assert len(one) == 40 - len(model.tokenizer.encode("The cat").ids)  # one run: both are cut where their own limit is


def test_encoder_decoder_writes_all_prompts_in_one_run(tmp_path: Any) -> None:
    counted: list[int] = []
    load(t5(tmp_path)).generate(PROMPTS, max_new_tokens=5, on_token=counted.append)
    assert counted == [1, 2, 3, 4, 5][: len(counted)]


def test_padding_takes_no_room() -> None:
    ids = torch.zeros(3, 11, dtype=torch.long)
    mask = torch.arange(11) >= torch.tensor([[0], [4], [9]])  # 11, 7 and 2 tokens
    begun = PromptBatch(None, ids, mask, 13, 5, ids)  # type: ignore[arg-type]
    assert token_limits(begun, GenerationConfig()) == [3, 7, 12]
    assert token_limits(begun, GenerationConfig(max_new_tokens=3)) == [3, 3, 3]


def test_steps_are_counted_though_nobody_is_told() -> None:
    steps = StepCounter(None)
    steps(3)
    steps.next_run()
    told: list[int] = []
    steps._on_token = told.append
    steps(2)
    assert told == [5]
