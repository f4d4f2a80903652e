"""Batches that end at different steps, and beams, under `watch`: the rows are as one pass over each text gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from speaking_twins import bart, gpt2, llama, t5
from torch import Tensor

import regard
from regard.generation.loop import generate
from regard.models.loading import load
from regard.testing import assert_rule

ALL = slice(None)
PROMPTS = ["The cat sat on the", "it was too tired because"]
FAMILIES = {"gpt2": gpt2, "llama": llama, "t5": t5, "bart": bart}
ENDS = [3, 5, 7, 8, 11, 12, 14, 17, 21, 23, 25, 29]  # so many tokens that hypotheses end at different steps


def eager(folder: Path, family: str, dtype: torch.dtype) -> Any:
    kind = tf.AutoModelForSeq2SeqLM if family in ("t5", "bart") else tf.AutoModelForCausalLM
    return kind.from_pretrained(folder, attn_implementation="eager", dtype=dtype).eval()


def weights(twin: Any, prompt: Tensor, text: Tensor) -> list[Tensor]:
    """Of every decoder layer (H, N, N), and after each that of cross-attention: one pass over one sequence."""
    with torch.no_grad():
        if not twin.config.is_encoder_decoder:
            return [w[0] for w in twin(text[None], output_attentions=True).attentions]
        out = twin(input_ids=prompt[None], decoder_input_ids=text[None], output_attentions=True)
    pairs = zip(out.decoder_attentions, out.cross_attentions, strict=True)
    return [w[0] for pair in pairs for w in pair]


def assert_rows_of(views: list[Any], row: int, baseline: list[Tensor], truth: list[Tensor], skip: int = 0) -> None:
    """A batch row of every layer is what one pass over its sequence gives; after its end it sees nothing."""
    for view, base, exact in zip(views, baseline, truth, strict=True):
        nq, nk = exact.shape[1:]
        keys = slice(skip, skip + nk) if view.kind == "self" else slice(view.sizes[3] - nk, None)  # padded on the left
        ours = view.tile(ALL, ALL)[row]  # (H, Nq, Nk)
        assert_rule(ours[:, skip : skip + nq, keys], base, exact)
        assert not ours[:, skip + nq :].any()
        entropy = -torch.xlogy(exact, exact).sum(-1)
        torch.testing.assert_close(view.entropy[row][:, skip : skip + nq].double(), entropy, rtol=1e-4, atol=1e-5)
        assert not view.entropy[row][:, skip + nq :].any()


# -------------------------------------------------------------------------------------------------- regard's own models


WAYS: dict[str, dict[str, Any]] = {
    "beams": {"max_new_tokens": 9, "num_beams": 3, "length_penalty": -0.3, "early_stopping": False},
    "greedy": {"max_new_tokens": 9},
    "sampled": {"max_new_tokens": 9, "temperature": 1.5, "seed": 3},
    "to a length": {"max_length": 17, "eos_token_ids": ()},  # a shorter prompt has more room
    "stop strings": {"max_new_tokens": 9, "stop_strings": ("a", "e")},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_returned_sequences_of_our_models_are_the_rows(family: str, way: str, tmp_path: Path) -> None:
    folder = FAMILIES[family](tmp_path / "model", generation={"eos_token_id": ENDS, "pad_token_id": 0})
    model, options = load(folder), WAYS[way]
    unwatched = model.generate(PROMPTS, **options)
    with regard.watch(model, keep="qk") as seen:
        made = model.generate(PROMPTS, **options)
    assert [one.ids.tolist() for one in made] == [one.ids.tolist() for one in unwatched]
    seen.save(tmp_path / "run.regard")
    twins = [eager(folder, family, dtype) for dtype in (torch.float32, torch.float64)]
    prompts = [torch.tensor(model.tokenizer.encode(prompt).ids) for prompt in PROMPTS]
    for capture in (seen, regard.open(tmp_path / "run.regard")):
        views = [capture[name] for name in capture.names if not name.startswith("encoder")]
        for row, (prompt, one) in enumerate(zip(prompts, made, strict=True)):
            start = torch.tensor([twins[0].config.decoder_start_token_id]) if family in ("t5", "bart") else prompt
            text = torch.cat([start, one.ids[:-1]])  # nobody reads the last token
            skip = 0 if family in ("t5", "bart") else max(map(len, prompts)) - len(prompt)
            assert_rows_of(views, row, *(weights(twin, prompt, text) for twin in twins), skip=skip)
        assert capture.doctor() is not None
        assert "returned" not in capture.summary()


def test_beams_of_two_generations_are_two_runs(tmp_path: Path) -> None:
    model = load(gpt2(tmp_path / "model", generation={"eos_token_id": ENDS, "pad_token_id": 0}))
    with regard.watch(model, keep="qk") as seen:
        first = model.generate(PROMPTS[0], max_new_tokens=5, num_beams=2)
        second = model.generate(PROMPTS, max_new_tokens=6, num_beams=3)
        greedy = model.generate(PROMPTS[0], max_new_tokens=4)
    runs = [run for run in seen.runs() if run.path == seen.names[0]]
    lengths = [max(len(one.ids) for one in several) for several in ([first], second, [greedy])]
    prompt = len(model.tokenizer.encode(PROMPTS[0]).ids)
    longest = max(prompt, len(model.tokenizer.encode(PROMPTS[1]).ids))
    expected = [(1, prompt + lengths[0] - 1), (2, longest + lengths[1] - 1), (1, prompt + lengths[2] - 1)]
    assert [(run.view.sizes[0], run.view.sizes[2]) for run in runs] == expected
    assert runs[2].records[0].link.returned is None


# --------------------------------------------------------------------------------------------------------- other models


@pytest.fixture
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """A transformers model on SDPA, its eager twins in two precisions, a capture and what was returned."""
    folder = gpt2(tmp_path_factory.mktemp("gpt2"), generation={"eos_token_id": ENDS, "pad_token_id": 0})
    model = tf.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    ids = torch.tensor([[31, 40, 33, 52, 37], [36, 51, 44, 32, 50]])
    with torch.no_grad(), regard.watch(model, keep="qk") as seen:
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=4,
            num_return_sequences=3,
            max_new_tokens=9,
            length_penalty=-0.5,
            eos_token_id=list(range(1, 120)),
            pad_token_id=0,
            return_dict_in_generate=True,
        )
    return model, [eager(folder, "gpt2", dtype) for dtype in (torch.float32, torch.float64)], seen, out


def test_returned_sequences_of_other_models_are_the_rows_when_they_are_told(searched: Any, tmp_path: Path) -> None:
    _, twins, seen, out = searched
    lengths = (out.beam_indices >= 0).sum(1).tolist()
    assert len(set(lengths)) > 1  # or this would test less
    assert seen[0].sizes[0] == 8
    assert "capture.returned(output)" in seen.summary()
    assert "capture.returned(output)" in seen.summary("ko")
    for beams in (out, out.beam_indices, out.beam_indices.tolist()):
        seen.returned(beams)
        assert seen[0].sizes == (6, 5, 5 + max(lengths) - 1, 5 + max(lengths) - 1)
    assert "capture.returned(output)" not in seen.summary()
    seen.save(tmp_path / "run.regard")
    for capture in (seen, regard.open(tmp_path / "run.regard")):
        views = [capture[name] for name in capture.names]
        for row, (text, length) in enumerate(zip(out.sequences, lengths, strict=True)):
            truth = (weights(twin, text, text[: 5 + length - 1]) for twin in twins)
            assert_rows_of(views, row, *truth)
        for view in views:
            ended = torch.tensor(lengths) < max(lengths)
            assert view.lse[ended][..., -1].isinf().all()
            assert torch.equal(view.place.padding[:, -1], ended)
            torch.testing.assert_close(view.received, view.tile(ALL, ALL).sum(2), rtol=1e-4, atol=1e-5)
            keys = torch.arange(view.sizes[2]) // 2
            chosen = view.tile(ALL, ALL).gather(-1, keys.expand(view.sizes[:3]).unsqueeze(-1)).squeeze(-1)
            torch.testing.assert_close(view.weights.pairs(keys), chosen)
            assert view.map(4).shape == (6, 5, 4, 4)
            assert set(view.patterns()) >= {"own", "previous"}


@pytest.mark.parametrize(
    ("beams", "error", "message"),
    [
        (None, TypeError, "return_dict_in_generate=True"),
        ("0", TypeError, "beam_indices"),
        ([], TypeError, "beam_indices"),
        ([[0, 1.5]], TypeError, "beam_indices"),
        ([[0, -2]], TypeError, "beam_indices"),
        ([[0, 8]], ValueError, r"row.*8"),
        ([[0] * 50], LookupError, "50"),
    ],
)
def test_beams_that_are_none_are_refused(searched: Any, beams: Any, error: type[Exception], message: str) -> None:
    _, _, seen, _ = searched
    with pytest.raises(error, match=message):
        seen.returned(beams)


def test_generation_that_kept_no_beam_indices_is_refused(searched: Any) -> None:
    _, _, seen, out = searched
    out = type(out)(sequences=out.sequences)
    with pytest.raises(TypeError, match="return_dict_in_generate=True"):
        seen.returned(out)


def test_forged_beams_are_refused(searched: Any, tmp_path: Path) -> None:
    _, _, seen, out = searched
    seen.returned(out)
    link = seen.records[-1].link
    good = link.returned
    for bad in ((99, *good[1:]), (*good, 0), ()):
        link.returned = bad
        with pytest.raises(ValueError, match="batch"):
            seen.save(tmp_path / "run.regard")
    link.returned = good


def test_sequences_of_one_prompt_are_the_rows(tmp_path: Path) -> None:
    model = load(gpt2(tmp_path / "model", generation={"eos_token_id": ENDS, "pad_token_id": 0}))
    ids = torch.tensor([model.tokenizer.encode(PROMPTS[0]).ids])
    with regard.watch(model) as seen, torch.no_grad():
        made = generate(model, ids, max_new_tokens=4, num_beams=2, num_return_sequences=2, eos_token_ids=())
    texts = torch.cat([ids.expand(2, -1), made.ids[:, :-1]], 1)  # nobody reads the last token
    with regard.watch(model) as whole, torch.no_grad():
        model(texts)
    assert seen[0].sizes == whole[0].sizes
    torch.testing.assert_close(seen[0].entropy, whole[0].entropy, rtol=0, atol=1e-5)
