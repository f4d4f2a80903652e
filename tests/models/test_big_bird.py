from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import BigBirdConfig
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention
from twins import Twin, assert_same, assert_saved, assert_side_of_padding_changes_nothing, change, of_theirs, texts

import regard
from regard import masks
from regard.models.loading import load
from regard.models.model import Model
from regard.models.outputs import ModelOutput
from regard.nn.attention import GrowingCache
from regard.nn.sparse_attention import BlockAttention, BlockPattern, Repeated, block_counts, drawn_blocks

SMALL = {"vocab_size": 47, "hidden_size": 20, "num_hidden_layers": 3, "num_attention_heads": 5, "intermediate_size": 29}
SMALL |= {"max_position_embeddings": 41, "type_vocab_size": 3, "num_labels": 7, "sep_token_id": 6}
SMALL |= {"block_size": 3, "num_random_blocks": 2}
OTHER = {"vocab_size": 31, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 17}
OTHER |= {"max_position_embeddings": 43, "hidden_act": "relu", "layer_norm_eps": 1e-5, "tie_word_embeddings": False}
OTHER |= {"block_size": 5, "num_random_blocks": 1, "use_bias": False, "rescale_embeddings": True, "sep_token_id": 5}
CONFIGS = {"blocks of 3": SMALL, "blocks of 5, own word table": OTHER}
HEADS = ["Model", "ForMaskedLM", "ForPreTraining", "ForSequenceClassification", "ForTokenClassification"]
HEADS += ["ForQuestionAnswering"]
LONG, SHORT = 37, 11  # 27 and 35 tokens are looked at as a whole
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def unpadded(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """What transformers makes of inputs; it leaves what it padded on in the layers' vectors."""
    n = inputs["input_ids"].shape[1]
    return {name: t[:, :n] if name.startswith("layer") else t for name, t in of_theirs(model, inputs).items()}


@dataclass
class TrainedTwin(Twin):
    """Both in training mode, where blocks are drawn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.truth.train()

    def baseline(self, dtype: torch.dtype) -> nn.Module:
        return super().baseline(dtype).train()

    def ours(self, dtype: torch.dtype, **more: Any) -> Model:
        return super().ours(dtype, **more).train()


def twin_of(head: str, config: str, directory: Path, kind: type[Twin] = Twin, **more: Any) -> Twin:
    values = CONFIGS[config] | ({"num_labels": 2} if head == "ForQuestionAnswering" else {}) | more
    return kind("BigBird" + head, BigBirdConfig(**values), directory, read=unpadded)


def inputs(side: str = "none", *, length: int = LONG, separator: int | None = None) -> dict[str, Tensor]:
    """Thirteen texts. separator: stands once in each, as after a question."""
    given = texts(31, side, length=length, first=7)
    if separator is not None:
        given["input_ids"][torch.arange(13), torch.arange(13) % 2 + 1] = separator
    types = torch.randint(0, 2, given["input_ids"].shape, generator=torch.Generator().manual_seed(5))
    return given if side == "none" else {**given, "token_type_ids": types}


def behind_the_question(given: dict[str, Tensor], separator: int) -> Tensor:
    """(B, N): where scores are not a million less, which would hide what they differ by."""
    ends = given["input_ids"] == separator
    real = (ends.cumsum(1) - ends.long()) > 0
    return real & given.get("attention_mask", real)


def compare(twin: Twin, head: str, dtype: torch.dtype, given: dict[str, Tensor], **more: Any) -> None:
    if head == "ForQuestionAnswering":
        more["real"] = behind_the_question(given, twin.config.sep_token_id)
    assert_same(twin, dtype, given, **more)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("head", HEADS)
def test_every_head_computes_what_transformers_computes(head, config, dtype, tmp_path):
    twin = twin_of(head, config, tmp_path)
    separator = twin.config.sep_token_id if head == "ForQuestionAnswering" else None
    for side in ("none", "right"):
        compare(twin, head, dtype, inputs(side, separator=separator))
    # The last: transformers then stays with looking at texts as a whole.
    compare(twin, head, dtype, inputs("right", length=SHORT, separator=separator), gradients=False)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_model_that_never_looks_by_blocks_computes_the_same(config, tmp_path):
    twin = twin_of("ForMaskedLM", config, tmp_path, attention_type="original_full")
    for side in ("none", "right", "left"):
        assert_same(twin, torch.float64, inputs(side))


@pytest.mark.parametrize("config", CONFIGS)
def test_padding_on_the_left_computes_the_same(config, tmp_path):
    assert_same(twin_of("ForMaskedLM", config, tmp_path), torch.float64, inputs("left"))


@pytest.mark.parametrize("length", [28, 30, 31, 38])
def test_any_length_is_read(length, tmp_path):
    assert_same(twin_of("ForMaskedLM", "blocks of 3", tmp_path), torch.float64, inputs(length=length), gradients=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("config", CONFIGS)
def test_in_training_the_same_blocks_are_drawn(config, dtype, tmp_path):
    twin = twin_of("ForMaskedLM", config, tmp_path, TrainedTwin, **NO_DROPOUT)
    for side in ("none", "right"):
        assert_same(twin, dtype, inputs(side))


@pytest.mark.parametrize("longest", [1024, 4093])
def test_in_training_the_papers_lengths_are_drawn_as_in_the_paper(longest, tmp_path):
    """1000 tokens are padded to 1024. Some blocks are drawn that are seen already, and count twice."""
    small = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": longest}
    small |= {"block_size": 64, "num_random_blocks": 3}
    twin = twin_of("ForMaskedLM", "blocks of 3", tmp_path, TrainedTwin, **small, **NO_DROPOUT)
    ids = torch.randint(7, 47, (2, 1000), generator=torch.Generator().manual_seed(3))
    assert_same(twin, torch.float64, {"input_ids": ids})
    counts = block_counts(16, torch.from_numpy(drawn_blocks(1024, 64, num_heads=2, random=3, seed=0, longest=longest)))
    assert counts.max() == 2


@pytest.mark.parametrize("head", HEADS)
def test_a_model_can_be_pickled_and_copied(head, tmp_path):
    model, given = twin_of(head, "blocks of 3", tmp_path).ours(torch.float64), inputs("right", separator=6)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(other(**given).last_hidden_state, model(**given).last_hidden_state)


@pytest.mark.parametrize("head", HEADS)
def test_what_we_save_transformers_opens(head, tmp_path):
    twin = twin_of(head, "blocks of 3", tmp_path / "theirs")
    assert_saved(twin, tmp_path / "ours", inputs("right"))
    assert load(tmp_path / "ours").family.title == "BigBird"


@pytest.mark.parametrize("head", [head for head in HEADS if head != "ForQuestionAnswering"])
def test_the_side_of_padding_of_short_texts_changes_nothing(head, tmp_path):
    assert_side_of_padding_changes_nothing(twin_of(head, "blocks of 3", tmp_path).ours(torch.float64))


def test_a_short_text_changes_nothing_for_the_next(tmp_path):
    """transformers looks at every later text as a whole, too."""
    model = twin_of("Model", "blocks of 3", tmp_path).ours(torch.float64)
    ids = inputs()["input_ids"]
    before = model(ids).last_hidden_state
    model(ids[:, :SHORT])
    assert torch.equal(model(ids).last_hidden_state, before)


def test_a_body_is_read_from_a_checkpoint_without_a_pooler(tmp_path):
    twin = twin_of("ForQuestionAnswering", "blocks of 3", tmp_path)
    result = twin.ours(torch.float32, task="feature-extraction")(inputs()["input_ids"])
    assert result.pooler_output is None
    assert result.last_hidden_state.shape == (13, LONG, 20)


# ------------------------------------------------------------------------------------------------------------- answers


def spans(output: ModelOutput) -> torch.Tensor:
    """(B, N, 2), where an answer starts and ends."""
    return torch.stack([output.start_logits, output.end_logits], -1)


def test_an_answer_does_not_lie_in_the_question(tmp_path):
    twin = twin_of("ForQuestionAnswering", "blocks of 3", tmp_path)
    ids = inputs(separator=6)["input_ids"][:3]
    logits = spans(twin.ours(torch.float64)(ids))
    theirs = unpadded(twin.truth, {"input_ids": ids})["logits"]
    torch.testing.assert_close(logits, theirs, rtol=0, atol=1e-8)  # of numbers near a million
    hidden = torch.zeros(3, LONG, dtype=torch.bool)
    hidden[[0, 1, 1, 2], [1, 1, 2, 1]] = True  # up to the separator, but for the first token
    assert torch.equal(logits[..., 0] < -1e5, hidden)


def test_segments_are_told_by_the_separator_unless_given(tmp_path):
    model = twin_of("ForQuestionAnswering", "blocks of 3", tmp_path).ours(torch.float64)
    ids = inputs(separator=6)["input_ids"]
    ends = ids == 6
    told = ((ends.cumsum(1) - ends.long()) > 0).long()
    assert torch.equal(spans(model(ids)), spans(model(ids, token_type_ids=told)))
    assert not torch.allclose(model(ids).last_hidden_state, model(ids, token_type_ids=1 - told).last_hidden_state)


def test_a_text_without_a_separator_is_all_context(tmp_path):
    twin = twin_of("ForQuestionAnswering", "blocks of 3", tmp_path)
    ids, mask = inputs("right")["input_ids"], inputs("right")["attention_mask"]
    logits = spans(twin.ours(torch.float64)(ids, mask))
    assert bool((logits.abs() < 1e3).all())
    theirs = unpadded(twin.truth, {"input_ids": ids, "attention_mask": mask.long()})["logits"]
    torch.testing.assert_close(logits[mask], theirs[mask], rtol=0, atol=1e-12)


def test_a_separator_in_the_padding_is_none(tmp_path):
    model = twin_of("ForQuestionAnswering", "blocks of 3", tmp_path).ours(torch.float64)
    ids, mask = torch.full((2, 9), 8), torch.arange(9) < torch.tensor([[9], [7]])
    ids[1, 8] = 6
    assert bool((spans(model(ids, mask)).abs() < 1e3).all())


# ------------------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"attention_type": "sliding"}, r"attention_type.*'sliding'.*'block_sparse'.*'original_full'"),
        ({"block_size": 0}, r"block_size.*1"),
        ({"num_random_blocks": -1}, r"num_random_blocks.*0"),
        ({"position_embedding_type": "relative_key"}, r"position_embedding_type.*'relative_key'.*'absolute'"),
        ({"is_decoder": True}, r"is_decoder.*True.*False"),
        ({"add_cross_attention": True}, r"add_cross_attention.*True.*False"),
        ({"adapters": "two"}, r"BigBird.*adapters.*'two'"),
        ({"architectures": ["BigBirdForCausalLM"]}, r"BigBirdForCausalLM.*BigBird"),
    ],
)
def test_a_setting_that_changes_the_maths_is_refused(values, said, tmp_path):
    twin_of("Model", "blocks of 3", tmp_path)
    with pytest.raises(ValueError, match=said):
        load(change(tmp_path, **values))


def test_one_segment_is_too_few_for_a_question_and_a_context(tmp_path):
    twin_of("ForQuestionAnswering", "blocks of 3", tmp_path)
    with pytest.raises(ValueError, match=r"type_vocab_size.*2"):
        load(change(tmp_path, type_vocab_size=1))


def test_dropout_stands_where_transformers_has_it(tmp_path):
    twin_of("ForSequenceClassification", "blocks of 3", tmp_path)
    model = load(change(tmp_path, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.2))
    assert (model.tower.embed.norm.dropout.p, model.tower.embed.dropout.p) == (0.3, 0.0)
    assert (model.head.before.p, model.head.dropout.p) == (0.3, 0.3)
    assert {(b.dropout.p, b.attention.dropout, b.attention.pattern.seed) for b in model.tower.depth} == {
        (0.3, 0.2, seed) for seed in range(3)
    }
    head = load(change(tmp_path, classifier_dropout=0.1)).head
    assert (head.before.p, head.dropout.p) == (0.1, 0.1)


def test_embeddings_are_dropped_before_they_are_normed(tmp_path):
    twin_of("Model", "blocks of 3", tmp_path)
    embed = load(change(tmp_path, hidden_dropout_prob=0.5)).tower.embed.train()
    made = embed(torch.full((53, 7), 8), torch.arange(7))
    assert not torch.equal(made[0], made[1])
    assert not bool((made == 0).any())  # what dropout zeroes after a norm would be 0


# ----------------------------------------------------------------------------------------------------------- the layer


def layer_and_input(*, train: bool = False) -> tuple[BlockAttention, Tensor, Tensor]:
    """Two texts of 29 tokens in 10 blocks of 3, the second padded from 23 on."""
    torch.manual_seed(19)
    layer = BlockAttention(21, 3, BlockPattern(3, 2, 5, 64)).double().train(train)
    return layer, torch.randn(2, 29, 21, dtype=torch.float64), torch.arange(29) < torch.tensor([[29], [23]])


def counts_of(layer: BlockAttention) -> Tensor:
    """(1 or 3, 29, 29): how often each key counts for each query."""
    drawn = np.zeros((1, 8, 2), dtype=np.int64)
    if layer.training:
        drawn = drawn_blocks(30, 3, num_heads=3, random=2, seed=5, longest=64)
    counts = block_counts(10, torch.from_numpy(drawn))
    return counts.repeat_interleave(3, 1).repeat_interleave(3, 2)[:, :29, :29]


def dense_weights(layer: BlockAttention, x: Tensor, tokens: Tensor) -> Tensor:
    """(2, 3, 29, 29): each exponential as often as its key counts."""
    q, k, _ = layer.project(x)
    s = torch.exp(q @ k.mT / 7**0.5) * counts_of(layer) * tokens[:, None, None]
    return s / s.sum(-1, keepdim=True)


@pytest.mark.parametrize("train", [False, True])
def test_a_key_counts_as_often_as_it_is_gathered(train):
    layer, x, tokens = layer_and_input(train=train)
    v = layer.project(x)[2]
    expected = layer.w_o((dense_weights(layer, x, tokens) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, mask=masks.padding(tokens)), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("backend", ["reference", "tiled", "sdpa", "flex", "sparse"])
@pytest.mark.parametrize("train", [False, True])
@torch.no_grad()  # FlexAttention has no backward on the CPU
def test_every_backend_computes_the_same(train, backend):
    layer, x, tokens = layer_and_input(train=train)
    other = BlockAttention(21, 3, BlockPattern(3, 2, 5, 64), backend=backend).double().train(train)
    other.load_state_dict(layer.state_dict())
    padding = masks.padding(tokens)
    torch.testing.assert_close(other(x, mask=padding), layer(x, mask=padding), rtol=0, atol=1e-13)


@pytest.mark.parametrize("train", [False, True])
def test_views_are_the_dense_weights_with_zeros_elsewhere(train):
    layer, x, tokens = layer_and_input(train=train)
    weights = dense_weights(layer, x, tokens)
    with torch.no_grad(), regard.watch(nn.ModuleDict({"attention": layer}), keep="qk") as seen:
        layer(x, mask=masks.padding(tokens))
    view = seen["attention"]
    found = view.tile(slice(None), slice(None))
    torch.testing.assert_close(found, weights, rtol=0, atol=1e-14)
    assert torch.equal(found == 0, weights == 0)
    torch.testing.assert_close(view.row(13), weights[:, :, 13], rtol=0, atol=1e-14)
    torch.testing.assert_close(view.received, weights.sum(2), rtol=0, atol=1e-13)


def test_watching_changes_no_bit(tmp_path):
    model = twin_of("ForMaskedLM", "blocks of 3", tmp_path).ours(torch.float32)
    ids = inputs()["input_ids"]
    before = model(ids).logits
    with regard.watch(model) as seen:
        assert torch.equal(model(ids).logits, before)
    assert seen.names == [f"tower.blocks.{i}.attention" for i in range(3)]


def test_dropout_is_on_whole_texts_only():
    layer, x, _ = layer_and_input(train=True)
    layer.dropout = 0.25
    told: list[float] = []

    def note(call: Any, backend: str, out: Tensor) -> None:
        told.append(call.dropout)

    regard.op.observe(note)
    layer(x)
    layer(x[:, :27])
    layer.eval()(x[:, :27])
    regard.op.unobserve(note)
    assert told == [0.0, 0.25, 0.0]


def test_layers_share_their_mask_unless_they_draw():
    one, other = (BlockAttention(6, 2, BlockPattern(2, 1, seed, 64)).eval() for seed in (0, 1))
    cpu = torch.device("cpu")
    assert one.rules(17, cpu)[0] is other.rules(17, cpu)[0]
    assert one.rules(17, cpu)[0].leading == (1, 1)
    one.train()
    other.train()
    assert one.rules(17, cpu)[0] is one.rules(17, cpu)[0]
    assert one.rules(17, cpu)[0] != other.rules(17, cpu)[0]
    assert one.rules(17, cpu)[0].leading == (1, 2)


def test_without_drawn_blocks_nothing_counts_twice():
    layer = BlockAttention(6, 2, BlockPattern(2, 0, 0, 64))
    mask, bias = layer.rules(13, torch.device("cpu"))
    assert bias is None
    assert mask.dense(13)[4].int().tolist() == [1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 1]
    assert layer(torch.zeros(1, 13, 6)).shape == (1, 13, 6)


def test_tiles_are_hidden_where_nobody_looks():
    layer = BlockAttention(6, 2, BlockPattern(64, 3, 0, 4096)).eval()
    mask, _ = layer.rules(4096, torch.device("cpu"))
    kinds = mask.tiles(4096, size=64)[0, 0]
    assert int((kinds == masks.FULL).sum()) == 2 * 64 + 2 * 4 + 60 * 5
    assert int((kinds == masks.PARTIAL).sum()) == 0


def test_blocks_have_neither_context_nor_cache():
    layer, x, _ = layer_and_input()
    for wrong in ({"context": x}, {"cache": GrowingCache()}):
        with pytest.raises(ValueError, match="context="):
            layer(x, **wrong)


def test_a_mask_that_is_no_mask_is_refused():
    layer, x, tokens = layer_and_input()
    with pytest.raises(TypeError, match=r"mask=.*mask.*regard.masks.padding\(…\).*Tensor"):
        layer(x, mask=tokens)


@pytest.mark.parametrize(
    ("name", "wrong", "error"), [("size", 0, ValueError), ("size", 2.0, TypeError), ("random", -1, ValueError)]
)
def test_blocks_of_nothing_are_refused(name, wrong, error):
    values = {"size": 2, "random": 1, "seed": 0, "longest": 8} | {name: wrong}
    with pytest.raises(error, match=rf"{name}.*blocks.*{wrong}"):
        BlockAttention(6, 2, BlockPattern(**values))


def test_the_layer_says_what_it_is():
    assert repr(BlockAttention(6, 2, BlockPattern(3, 1, 4, 8))).startswith(
        "BlockAttention(\n  6, num_heads=2, head_dim=3, size=3, random=1, seed=4"
    )


# ------------------------------------------------------------------------------------------------------------- drawing


def their_blocks(tokens: int, size: int, *, num_heads: int, random: int, seed: int, longest: int) -> Any:
    config = BigBirdConfig(
        hidden_size=2 * num_heads, num_attention_heads=num_heads, block_size=size, num_random_blocks=random
    )
    config.max_position_embeddings = longest
    theirs = BigBirdBlockSparseAttention(config, seed).train()
    state = np.random.get_state()
    try:
        np.random.seed(seed)
        if tokens in (1024, 3072, 4096):
            draw = partial(theirs._bigbird_block_rand_mask, longest, longest, size, size, random, last_idx=1024)
            return np.stack([draw()[: tokens // size - 2] for _ in range(num_heads)])
        lengths, numbers = theirs._get_rand_attn_plan(tokens, size, random)
        return np.stack(
            theirs._bigbird_block_rand_mask_with_head(tokens, tokens, size, size, num_heads, lengths, numbers)
        )
    finally:
        np.random.set_state(state)


@pytest.mark.parametrize(
    ("tokens", "size", "heads", "random", "seed", "longest"),
    [
        (36, 4, 1, 1, 0, 64),
        (64, 4, 3, 2, 5, 64),
        (768, 64, 12, 3, 11, 4096),
        (2048, 64, 3, 3, 4, 4096),
        (1024, 64, 3, 3, 2, 4096),
        (1024, 64, 3, 3, 2, 1024),
        (3072, 64, 2, 3, 7, 4096),
        (4096, 64, 2, 3, 1, 4096),
        (1024, 32, 2, 2, 1, 1030),
        (4096, 512, 2, 1, 3, 4096),
    ],
)
def test_blocks_are_drawn_as_transformers_draws_them(tokens, size, heads, random, seed, longest):
    before = np.random.get_state()[1].copy()
    given = {"num_heads": heads, "random": random, "seed": seed, "longest": longest}
    ours = drawn_blocks(tokens, size, **given)
    assert np.array_equal(np.random.get_state()[1], before)  # nobody else's numbers are touched
    assert np.array_equal(ours, their_blocks(tokens, size, **given))
    assert np.array_equal(ours, drawn_blocks(tokens, size, **given))


def test_too_few_blocks_to_draw_from_are_refused():
    with pytest.raises(ValueError, match=r"row.*2.*1.*2"):
        drawn_blocks(1024, 200, num_heads=1, random=2, seed=0, longest=1800)


def test_counts_become_logarithms():
    counts = torch.tensor([[[[1, 3], [0, 2]]]])
    bias = Repeated(counts, 2)
    expected = torch.tensor([[1.0, 3.0], [1.0, 2.0]]).log().repeat_interleave(2, 0).repeat_interleave(2, 1)[:3]
    assert torch.equal(bias.dense(3, 4, dtype=torch.float64), expected.double().exp().round().log())
    assert bias.leading == (1, 1)
    assert not bias.tensors  # nothing to learn
    assert bias == Repeated(counts.clone(), 2) != Repeated(counts, 3)
