"""Prompt look-up: the tokens are those of decoding one by one, in fewer passes of the model."""

from __future__ import annotations

import pytest
import torch
import transformers
from seeing_twins import idefics, llava, picture
from speaking_twins import bart, gpt2, llama, t5
from toy_decoders import Recurrent, padded
from twins import Twin

import regard
from regard.generation.loop import generate
from regard.models.loading import load
from regard.models.replacement import Performer, replace_attention
from regard.testing import assert_rule

V = 53
LOOPING = [11, 12, 13, 14, 15] * 3  # a prompt that says what comes next
LENGTHS = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 41, "num_attention_heads": 4}


class Table:
    """A model whose next token depends on the last one alone. It notes what each pass reads, and may be cropped."""

    one_by_one = None

    def __init__(self, following):
        self.following, self.passes = torch.tensor(following), []

    def begin(self, ids, mask, *, length):
        self.read, self.length = ids.clone(), length
        return self.extend(self, ids)[:, -1], self

    def step(self, state, tokens):
        return self.extend(state, tokens[:, None])[:, 0]

    def extend(self, state, tokens):
        self.passes.append(tokens.tolist())
        if len(self.passes) > 1:
            self.read = torch.cat([self.read, tokens], 1)
        assert self.read.shape[1] <= self.length
        return torch.nn.functional.one_hot(self.following[tokens], len(self.following)).float()

    def crop(self, length):
        self.read = self.read[:, :length]


def looped(vocabulary=V):
    """The tokens 11 to 15 in a ring; after any other comes the next number."""
    following = [(n + 1) % vocabulary for n in range(vocabulary)]
    following[15] = 11
    return Table(following)


def test_a_loop_is_read_by_the_draft():
    model = looped()
    output = generate(model, torch.tensor([LOOPING]), max_new_tokens=23, prompt_lookup_num_tokens=6)
    assert output.ids.tolist() == [(LOOPING * 4)[:23]]
    # One token by the prompt's pass, then seven by each; the last of 23 is chosen and not read.
    assert [len(tokens[0]) for tokens in model.passes] == [15, 7, 7, 7, 1]
    assert output.passes == 5
    assert model.read.tolist() == [LOOPING + (LOOPING * 4)[:22]]


def test_a_draft_reaches_over_the_end_of_the_text():
    """Two tokens that alternate: what follows the last place of them is one token long, and is drafted in full."""
    following = list(range(V))
    following[7], following[8] = 8, 7
    model = Table(following)
    output = generate(model, torch.tensor([[7, 8, 7]]), max_new_tokens=9, prompt_lookup_num_tokens=8)
    assert output.ids.tolist() == [[8, 7, 8, 7, 8, 7, 8, 7, 8]]
    assert output.passes == 2


def test_a_wrong_draft_is_forgotten():
    following = [(n + 1) % V for n in range(V)]
    model = Table(following)
    # 2 was followed by 9, and 9 by 1, as this model would never have it: of each draft nothing is right.
    output = generate(model, torch.tensor([[2, 9, 1, 1]]), max_new_tokens=5, prompt_lookup_num_tokens=3)
    assert output.ids.tolist() == [[2, 3, 4, 5, 6]]
    assert model.passes[1] == [[2, 9, 1, 1]]
    assert model.read.tolist() == [[2, 9, 1, 1, 2, 3, 4, 5]]
    assert output.passes == 5


@pytest.mark.parametrize(("ngram", "drafted"), [(1, 31), (2, 21), (3, 41)])
def test_the_longest_run_of_last_tokens_is_looked_up_and_its_latest_place_is_taken(ngram, drafted):
    #        3 2 1 → 41          2 1 → 21    1 → 31
    prompt = [3, 2, 1, 41, 5, 6, 2, 1, 21, 7, 1, 31, 3, 2]
    model = Table([1] * V)
    generate(model, torch.tensor([prompt]), max_new_tokens=3, prompt_lookup_num_tokens=1, max_matching_ngram_size=ngram)
    assert model.passes[1] == [[1, drafted]]


def test_rows_go_on_together_and_one_that_has_ended_holds_up_none():
    following = [(n + 1) % V for n in range(V)]
    following[12], following[22] = 11, 21
    prompts = torch.tensor([[11, 12, 11, 12, 11], [21, 22, 21, 22, 21], [40, 41, 42, 43, 44]])
    one_by_one = generate(Table(following), prompts, max_new_tokens=21, eos_token_ids=48)
    output = generate(Table(following), prompts, max_new_tokens=21, eos_token_ids=48, prompt_lookup_num_tokens=4)
    assert torch.equal(output.ids, one_by_one.ids)
    assert output.lengths == (21, 21, 4)
    # The last row has no draft that is right: one token a pass, four in all. The fourth pass gives four more, and three
    # passes the 13 that are left.
    assert output.passes == 4 + 3


def test_a_row_of_one_token_has_no_place_in_its_own_padding():
    model = looped(vocabulary=17)
    ids, mask = torch.tensor([[3, 4, 5], [0, 0, 5]]), torch.tensor([[True] * 3, [False, False, True]])
    output = generate(model, ids, mask, max_new_tokens=12, prompt_lookup_num_tokens=3)
    assert output.ids.tolist() == [[6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 11, 12]] * 2
    assert all(0 <= token < 17 for tokens in model.passes for row in tokens for token in row)


@pytest.mark.parametrize("new", [1, 2, 3, 8])
def test_no_more_is_read_than_there_is_room_for(new):
    model = looped()  # which asserts it
    output = generate(model, torch.tensor([LOOPING]), max_new_tokens=new, prompt_lookup_num_tokens=50)
    assert output.ids.tolist() == [(LOOPING * 4)[:new]]
    assert output.passes == min(new, 2)


# --------------------------------------------------------------------------------------------------------- real models


def models(directory):
    return {
        "GPT-2": lambda: gpt2(directory),
        "LLaMA": lambda: llama(directory),
        "T5": lambda: t5(directory),
        "BART": lambda: bart(directory),
    }


OPTIONS = [
    {},
    {"temperature": 1.3, "top_p": 0.9, "seed": 5},
    {"repetition_penalty": 1.2, "min_new_tokens": 40},
    {"stop_strings": ["a"]},
]
IDS = ["greedy", "sampled", "penalised", "stopped"]


@pytest.mark.parametrize("name", ["GPT-2", "LLaMA", "T5", "BART"])
@pytest.mark.parametrize("options", OPTIONS, ids=IDS)
def test_text_is_that_of_one_token_after_another(name, options, tmp_path):
    """In fp64: of logits that differ by rounding alone fp32 would sometimes put either first."""
    model = load(models(tmp_path)[name](), dtype=torch.float64)
    options = options | {"max_new_tokens": 60, "ignore": ["max_length"]}
    prompts = ["The cat sat on the mat. The cat sat", "it was", "The street was too wide, and the street"]
    for given in (prompts[0], prompts):
        plain, ahead = (model.generate(given, **options, prompt_lookup_num_tokens=n) for n in (0, 5))
        for one, other in zip(*([each] if given is prompts[0] else each for each in (plain, ahead)), strict=True):
            assert other.ids.tolist() == one.ids.tolist()
            assert (other.text, other.reason) == (one.text, one.reason)
            assert other.passes <= one.passes


def test_a_stream_is_that_of_one_token_after_another(tmp_path):
    model = load(gpt2(tmp_path), dtype=torch.float64)
    prompt = "The cat sat on the mat. The cat sat"
    plain = list(model.stream(prompt, max_new_tokens=60, stop_strings=["e "]))
    assert list(model.stream(prompt, max_new_tokens=60, stop_strings=["e "], prompt_lookup_num_tokens=5)) == plain


@pytest.mark.parametrize("maker", [llava, idefics])
def test_a_text_about_an_image_is_that_of_one_token_after_another(maker, tmp_path):
    model = load(maker(tmp_path), dtype=torch.float64)
    prompt = "<image> what is it? what is"
    plain, ahead = (
        model.generate(prompt, images=picture(), max_new_tokens=40, eos_token_ids=(), prompt_lookup_num_tokens=n)
        for n in (None, 4)
    )
    assert ahead.ids.tolist() == plain.ids.tolist()
    assert ahead.passes < plain.passes == 40


def test_trained_weights_tell_the_same_story_in_fewer_passes(data):
    folder = data / "weights_stories260k"
    if not folder.is_dir():
        pytest.skip("needs weights_stories260k in the shared data")
    model = load(folder)
    plain = generate(model, torch.tensor([[1]]), max_new_tokens=400)
    ahead = generate(model, torch.tensor([[1]]), max_new_tokens=400, prompt_lookup_num_tokens=8)
    assert torch.equal(ahead.ids, plain.ids)
    assert plain.passes == 400
    assert ahead.passes < 300
    drawn = [
        generate(model, torch.tensor([[1], [1]]), max_new_tokens=200, temperature=0.7, seed=3, **more).ids
        for more in ({}, {"prompt_lookup_num_tokens": 5})
    ]
    assert torch.equal(*drawn)


CONFIGS = {
    "GPT-2": ("GPT2LMHeadModel", transformers.GPT2Config(vocab_size=V, n_embd=20, n_layer=2, n_head=5, n_positions=61)),
    "LLaMA": (
        "LlamaForCausalLM",
        transformers.LlamaConfig(vocab_size=V, **LENGTHS, num_key_value_heads=2, max_position_embeddings=61),
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("side", ["none", "left"])
def test_several_tokens_at_once_are_one_pass_and_what_is_taken_back_leaves_nothing(name, side, tmp_path):
    twin = Twin(*CONFIGS[name], tmp_path)
    ids, mask = padded(13, 7, 9) if side == "left" else (padded(13, 13, 13)[0], None)
    new = torch.randint(3, 41, (3, 6), generator=torch.Generator().manual_seed(4))
    wrong = torch.randint(3, 41, (3, 4), generator=torch.Generator().manual_seed(5))
    whole = None if mask is None else torch.cat([mask, torch.ones_like(new, dtype=torch.bool)], 1)

    def ours(dtype):
        model = twin.ours(dtype)
        logits, state = model.begin(ids, mask, length=23)
        parts = [logits[:, None]]
        for part in new.split((1, 3, 2), 1):
            model.extend(state, wrong)
            state.crop(len(state) - wrong.shape[1])
            parts.append(model.step(state, part[:, 0])[:, None] if part.shape[1] == 1 else model.extend(state, part))
        return torch.cat(parts, 1)

    def at_once(dtype):
        model = twin.ours(dtype)
        with torch.no_grad():
            return model(torch.cat([ids, new], 1), whole).logits[:, -7:]

    assert_rule(ours(torch.float32), at_once(torch.float32), at_once(torch.float64))


def test_whoever_watches_is_told_of_each_token_once(tmp_path):
    model = load(gpt2(tmp_path), dtype=torch.float64)
    prompt, seen = "The cat sat on the mat. The cat sat", []
    for n in (None, 5):
        with regard.watch(model, keep="qk") as capture:
            output = model.generate(prompt, max_new_tokens=20, eos_token_ids=(), prompt_lookup_num_tokens=n)
        seen.append((output.ids.tolist(), output.passes, capture[0].sizes, capture[1].row(-1).tolist()))
    assert seen[0] == seen[1]
    assert seen[1][1] == 20


# -------------------------------------------------------------------------------------------------------------- errors


def test_models_that_read_one_token_at_a_time_are_refused(tmp_path):
    config = dict(vocab_size=V, **LENGTHS, max_position_embeddings=61)
    longer = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    performer = transformers.LlamaConfig(**config | {"max_position_embeddings": 122})
    performer = Twin("LlamaForCausalLM", performer, tmp_path / "performer").ours(torch.float32)
    replace_attention(performer, Performer(features=8, seed=5))
    dynamic = transformers.LlamaConfig(**config, rope_parameters=longer)
    dynamic = Twin("LlamaForCausalLM", dynamic, tmp_path / "dynamic").ours(torch.float32)
    ids = torch.tensor([LOOPING])
    for model, reason in ((performer, "sums"), (dynamic, "beyond 61"), (Recurrent(1), "extend")):
        with pytest.raises(ValueError, match=rf"prompt_lookup_num_tokens=3.*{reason}"):
            generate(model, ids % 41, max_new_tokens=90, prompt_lookup_num_tokens=3)
        assert generate(model, ids % 41, max_new_tokens=9).ids.shape == (1, 9)
    within = generate(dynamic, ids, max_new_tokens=9, prompt_lookup_num_tokens=3)
    assert torch.equal(within.ids, generate(dynamic, ids, max_new_tokens=9).ids)
    _, state = performer.begin(ids, None, length=20)
    with pytest.raises(ValueError, match=r"2 tokens.*sums"):
        performer.extend(state, ids[:, :2])
    assert len(state) == 15


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompt_lookup_num_tokens": -1}, "prompt_lookup_num_tokens.*-1"),
        ({"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 0}, "max_matching_ngram_size.*0"),
        ({"prompt_lookup_num_tokens": 4, "num_beams": 2}, "prompt_lookup_num_tokens"),
    ],
)
def test_numbers_out_of_range_and_beams_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        generate(looped(), torch.tensor([LOOPING]), max_new_tokens=5, **options)
