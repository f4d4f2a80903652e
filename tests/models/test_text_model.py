"""A model with one tower: token after token is one pass, padded or not; what does not fit is refused before it runs."""

from pathlib import Path

import pytest
import torch
from transformers import BertConfig, GPT2Config, LlamaConfig
from twins import RATIO, Twin, texts

from regard.models.loading import load
from regard.models.outputs import ModelOutput
from regard.models.text import TextModel
from regard.testing import assert_rule, largest_error

MOST, V = 29, 31
GPT2 = GPT2Config(vocab_size=V, n_embd=20, n_layer=3, n_head=5, n_positions=MOST)
LLAMA = {"vocab_size": V, "hidden_size": 30, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2}
LLAMA |= {"head_dim": 10, "intermediate_size": 37, "max_position_embeddings": MOST}
YARN = {"rope_type": "yarn", "rope_theta": 53.0, "factor": 4.0, "original_max_position_embeddings": 7}
CONFIGS = {
    "GPT-2": ("GPT2LMHeadModel", GPT2),
    "LLaMA": ("LlamaForCausalLM", LlamaConfig(**LLAMA)),
    "LLaMA, yarn": ("LlamaForCausalLM", LlamaConfig(**LLAMA, rope_parameters=YARN)),
}
MODELS = pytest.mark.parametrize("name", CONFIGS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """One directory for each of the models, and a BERT."""
    bert = BertConfig(vocab_size=V, hidden_size=20, num_hidden_layers=1, num_attention_heads=5, intermediate_size=29)
    made = {}
    for name, (architecture, config) in {**CONFIGS, "BERT": ("BertModel", bert)}.items():
        made[name] = tmp_path_factory.mktemp("model")
        Twin(architecture, config, made[name])
    return made


@pytest.fixture
def open_model(folders):
    return lambda name, dtype=torch.float32: load(folders[name], dtype=dtype)


def padded(length: int, prompt: int) -> dict[str, torch.Tensor]:
    """Thirteen texts padded on the left, by less than a prompt."""
    mask = torch.arange(length) >= (torch.arange(13) % prompt)[:, None]
    return {"input_ids": texts(V, length=length)["input_ids"].where(mask, 0), "attention_mask": mask}


def stepwise(
    model: TextModel, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, prompt: int
) -> torch.Tensor:
    """The logits after the prompt and after each further token, (B, N − prompt + 1, V)."""
    n = input_ids.shape[1]
    given = None if attention_mask is None else attention_mask[:, :prompt]
    logits, state = model.begin(input_ids[:, :prompt], given, length=n)
    made = [logits.clone()]
    for place in range(prompt, n):
        made.append(model.step(state, input_ids[:, place]).clone())
        assert len(state) == place + 1
    return torch.stack(made, 1)


# ---------------------------------------------------------------------------------------- one token after another


@MODELS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("prompt", "side"), [(1, "none"), (5, "none"), (5, "left"), (17, "left")])
def test_token_by_token_is_one_pass(name, dtype, prompt, side, open_model):
    given = {"attention_mask": None, **(padded(17, prompt) if side == "left" else texts(V, length=17))}
    ours = stepwise(open_model(name, dtype), given["input_ids"], given["attention_mask"], prompt)
    with torch.no_grad():
        truth, baseline = (open_model(name, d)(**given).logits[:, prompt - 1 :] for d in (torch.float64, torch.float32))
    if dtype == torch.float32:
        assert_rule(ours, baseline, truth)
    else:  # in fp64 one pass errs as it does in fp32, by the ratio of the rounding steps; and truth is such a pass
        step = torch.finfo(dtype).eps * float(truth.abs().max())
        assert largest_error(ours, truth)[0] <= 3 * (largest_error(baseline, truth)[0] * RATIO + step)


@MODELS
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_token_by_token_is_one_pass_under_autocast(name, half, open_model):
    given, model = padded(17, 5), open_model(name)
    with torch.no_grad(), torch.autocast("cpu", half):
        ours, baseline = stepwise(model, **given, prompt=5), model(**given).logits[:, 4:]
        wide = stepwise(open_model(name, torch.float64), **given, prompt=5)  # which autocast lets be
    assert ours.dtype == half
    assert torch.equal(wide, stepwise(open_model(name, torch.float64), **given, prompt=5))
    assert_rule(ours, baseline, wide)


def test_keys_are_kept_in_what_autocast_makes_of_them(open_model):
    model, ids = open_model("GPT-2"), texts(V, length=5)["input_ids"]
    with torch.autocast("cpu", torch.bfloat16):
        _, state = model.begin(ids, None, length=7)
        with torch.autocast("cpu", enabled=False):
            _, plain = model.begin(ids, None, length=7)
            with pytest.raises(ValueError, match=r"torch\.float32.*cpu.*torch\.bfloat16.*cpu"):
                model.step(state, ids[:, 0])
        with pytest.raises(ValueError, match=r"torch\.bfloat16"):
            model.step(plain, ids[:, 0])
    assert {cache.room[0].dtype for cache in state.caches} == {torch.bfloat16}
    assert {cache.room[0].dtype for cache in plain.caches} == {torch.float32}


@MODELS
def test_padding_on_the_left_changes_no_step(name, open_model):
    model, given = open_model(name, torch.float64), padded(17, 5)
    ours = stepwise(model, given["input_ids"], given["attention_mask"], 5)
    for row in (0, 3, 4):
        alone = given["input_ids"][row : row + 1, row % 5 :]
        torch.testing.assert_close(ours[row : row + 1], stepwise(model, alone, None, 5 - row % 5), rtol=0, atol=1e-12)


@MODELS
def test_what_padding_holds_changes_no_step(name, open_model):
    model, given = open_model(name), padded(17, 5)
    other = given["input_ids"].where(given["attention_mask"], 7)
    assert torch.equal(
        stepwise(model, given["input_ids"], given["attention_mask"], 5),
        stepwise(model, other, given["attention_mask"], 5),
    )


@MODELS
@pytest.mark.parametrize("rows", [[2, 0, 1], [1, 1, 0], [2], [0, 2, 2, 1, 0]], ids=str)
@pytest.mark.parametrize("side", ["none", "left"])
def test_rows_kept_go_on_as_if_they_had_been_there_always(name, rows, side, open_model):
    model, index = open_model(name, torch.float64), torch.tensor(rows)
    given = padded(9, 5) if side == "left" else {**texts(V, length=9), "attention_mask": None}
    ids, mask = given["input_ids"][1:4], None if given["attention_mask"] is None else given["attention_mask"][1:4]
    _, state = model.begin(ids[:, :5], None if mask is None else mask[:, :5], length=9)
    model.step(state, ids[:, 5])
    state.keep(index)
    assert len(state) == 6
    ours = [model.step(state, ids[index, place]).clone() for place in (6, 7, 8)]
    expected = stepwise(model, ids[index], None if mask is None else mask[index], 5)[:, 2:]
    torch.testing.assert_close(torch.stack(ours, 1), expected, rtol=0, atol=1e-12)


def test_steps_take_no_gradient(open_model):
    model = open_model("GPT-2")
    logits, state = model.begin(torch.ones(1, 2, dtype=torch.int64), None, length=3)
    assert not logits.requires_grad
    assert not model.step(state, torch.tensor([1])).requires_grad


def test_there_is_room_for_what_was_asked_and_no_more(open_model):
    model = open_model("LLaMA")
    _, state = model.begin(torch.ones(2, 3, dtype=torch.int64), None, length=4)
    assert [cache.length for cache in state.caches] == [4, 4, 4]
    model.step(state, torch.tensor([1, 1]))
    with pytest.raises(ValueError, match=r"4.*positions"):
        model.step(state, torch.tensor([1, 1]))


@MODELS
def test_room_beyond_the_positions_is_refused(name, open_model):
    ids, model = torch.ones(2, 3, dtype=torch.int64), open_model(name)
    model.begin(ids, None, length=MOST)
    message = rf"{MOST + 1}.*{MOST}"
    with pytest.raises(ValueError, match=message):
        model.begin(ids, None, length=MOST + 1)


# ------------------------------------------------------------------------------------------------------ what is refused

IDS = torch.ones(2, 5, dtype=torch.int64)
BAD_IDS = {
    "a list": (
        [[1, 2]],
        TypeError,
        r"ids.*int64.*int32.*\(B, N\).*model\.tokenizer\.batch",
    ),
    "floats": (
        IDS.float(),
        TypeError,
        r"int64.*int32.*\(B, N\).*torch\.float32.*model\.tokenizer\.batch\(\[…\]\)\.input_ids",
    ),
    "booleans": (IDS.bool(), TypeError, r"ids.*int64.*int32.*\(B, N\).*torch\.bool"),
    "complex": (IDS.cdouble(), TypeError, r"ids.*int64.*int32.*\(B, N\).*torch\.complex128"),
    "one text": (IDS[0], ValueError, r"ids.*\(B, N\).*\(5,\)"),
    "no token": (IDS[:, :0], ValueError, r"ids.*\(B, N\).*\(2, 0\)"),
    "no text": (IDS[:0], ValueError, r"ids.*\(B, N\).*\(0, 5\)"),
    "unknown": (IDS * V, ValueError, r"id.*31.*0.*30"),
    "negative": (-IDS, ValueError, r"id.*-1.*31.*0.*30"),
    "too long": (
        torch.ones(2, MOST + 1, dtype=torch.int64),
        ValueError,
        r"30.*29.*tokenizer\.batch\(…, length=29, truncate=True\)",
    ),
}


@pytest.mark.parametrize(("ids", "error", "message"), BAD_IDS.values(), ids=BAD_IDS)
@MODELS
def test_bad_ids_are_refused(name, ids, error, message, open_model):
    model = open_model(name)
    with pytest.raises(error, match=message):
        model(ids)
    with pytest.raises(error, match=message):
        model.begin(ids, None, length=MOST)


@pytest.mark.parametrize(
    ("mask", "got"),
    [
        (IDS + 2, r"torch\.int64.*3"),
        (IDS.float(), r"torch\.float32.*\(2, 5\)"),
        (IDS.bool()[:1], r"torch\.bool.*\(1, 5\)"),
        (IDS.bool()[:, :4], r"torch\.bool.*\(2, 4\)"),
        ([[True] * 5] * 2, "list"),
    ],
)
def test_bad_masks_are_refused(mask, got, open_model):
    with pytest.raises(ValueError, match=rf"attention_mask.*{got}"):
        open_model("LLaMA")(IDS, mask)


def test_the_last_id_and_the_last_position_are_allowed(open_model):
    for name in CONFIGS:
        assert open_model(name)(torch.full((1, MOST), V - 1)).logits.shape == (1, MOST, V)


def test_a_mask_that_hides_nothing_changes_nothing(open_model):
    model = open_model("LLaMA")
    assert torch.equal(model(IDS, IDS.bool()).logits, model(IDS).logits)


def test_segments_are_refused_where_there_are_none(open_model):
    for name, title in (("GPT-2", "GPT-2"), ("LLaMA", "LLaMA")):
        with pytest.raises(ValueError, match=rf"{title}.*token_type_ids="):
            open_model(name)(IDS, token_type_ids=torch.zeros_like(IDS))


def test_segments_of_another_shape_are_refused(open_model):
    with pytest.raises(ValueError, match=r"token_type_ids.*\(2, 5\).*\(2, 4\)"):
        open_model("BERT")(IDS, token_type_ids=torch.zeros(2, 4, dtype=torch.int64))


def test_a_model_made_by_hand_has_no_tokenizer_until_it_is_given_one(open_model):
    model = open_model("GPT-2")
    model.directory = None
    with pytest.raises(ValueError, match=r"model\.tokenizer"):
        model.tokenizer  # noqa: B018  a property that raises


# ----------------------------------------------------------------------------------------------------------- the result


def test_a_result_says_what_it_holds(open_model):
    made = open_model("LLaMA")(IDS, output_hidden_states=True)
    assert isinstance(made, ModelOutput)
    assert repr(made) == "ModelOutput(logits (2, 5, 31), last_hidden_state (2, 5, 30), hidden_states 4 layers)"
    assert torch.equal(made.hidden_states[-1], made.last_hidden_state)
    assert open_model("LLaMA")(IDS).hidden_states is None


@torch.no_grad()
def test_positions_may_be_given(open_model):
    for name in CONFIGS:
        model = open_model(name, torch.float64)
        counted = model(IDS, position_ids=torch.arange(5)).logits
        assert torch.equal(counted, model(IDS).logits)
        shifted = model(IDS, position_ids=torch.arange(5) + 3).logits
        gap = float((shifted - counted).abs().max())
        # Rotary knows distances alone, a table of positions does not.
        assert gap > 0.01 if name == "GPT-2" else gap < 1e-12


def test_only_words_can_be_gone_on_with(open_model):
    model = open_model("LLaMA")
    model.head, model.task = None, "feature-extraction"
    with pytest.raises(ValueError, match="'feature-extraction'"):
        model.begin(IDS, None, length=MOST)


def test_padding_on_the_right_cannot_be_gone_on_with(open_model):
    mask = torch.ones(IDS.shape, dtype=torch.bool)
    mask[0, -1] = False
    with pytest.raises(ValueError, match="padding"):
        open_model("LLaMA").begin(IDS, mask, length=MOST)


@pytest.mark.parametrize(
    ("positions", "error", "message"),
    [
        (list(range(5)), TypeError, r"position_ids.*int64.*int32.*\(N,\).*\(B, N\).*list"),
        (
            torch.arange(5.0),
            TypeError,
            r"position_ids.*int64.*int32.*\(N,\).*\(B, N\).*torch\.fl",
        ),
        (torch.arange(3), ValueError, r"position_ids.*\(5,\).*\(2, 5\).*\(3,\)"),
        (torch.arange(5).expand(3, 5), ValueError, r"position_ids.*\(5,\).*\(2, 5\).*\(3, 5\)"),
        (torch.arange(5) - 1, ValueError, r"position_ids.*0.*28.*-1.*3"),
        (torch.arange(5) + 25, ValueError, r"position_ids.*0.*28.*25.*29"),
    ],
)
def test_positions_that_do_not_fit_are_refused(positions, error, message, open_model):
    with pytest.raises(error, match=message):
        open_model("GPT-2")(IDS, position_ids=positions)


def test_rotary_positions_have_no_end_and_a_beginning(open_model):
    model = open_model("LLaMA")
    assert model(IDS, position_ids=torch.arange(5) + 1000).last_hidden_state.isfinite().all()
    with pytest.raises(ValueError, match=r"position_ids.*0.*-2.*2"):
        model(IDS, position_ids=torch.arange(5) - 2)


@pytest.mark.parametrize("types", [[[0] * 5] * 2, torch.zeros(2, 5)], ids=["list", "floats"])
def test_segments_are_whole_numbers(types, open_model):
    with pytest.raises(TypeError, match=r"token_type_ids.*int64.*int32.*\(B, N\).*(list|torch)"):
        open_model("BERT")(IDS, token_type_ids=types)


def test_room_that_no_memory_has_is_refused_with_its_size(open_model):
    model = open_model("LLaMA")
    model.max_positions = None
    # 3 layers, 2 · 2 key heads of 10, 4 bytes, 2 texts: 960 bytes a position
    with pytest.raises(ValueError, match=r"2.*1099511627776.*983,040\.0.*GiB"):
        model.begin(IDS, None, length=2**40)
