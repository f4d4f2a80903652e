from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LongformerConfig
from twins import Twin, assert_same, assert_saved, assert_side_of_padding_changes_nothing, change, texts, widened

import regard
from regard import masks
from regard.models.loading import load
from regard.models.model import Model
from regard.nn.attention import GrowingCache
from regard.nn.sparse_attention import Roles, SlidingAttention

SMALL = {"vocab_size": 47, "hidden_size": 20, "num_hidden_layers": 3, "num_attention_heads": 5, "intermediate_size": 29}
SMALL |= {"max_position_embeddings": 31, "type_vocab_size": 3, "num_labels": 7, "hidden_act": "relu"}
# transformers fails at a window of 2, and wants every window to divide the widest.
SMALL |= {"attention_window": [4, 12, 6], "pad_token_id": 1}
OTHER = {"vocab_size": 31, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 17}
OTHER |= {"max_position_embeddings": 37, "type_vocab_size": 1, "layer_norm_eps": 1e-3, "tie_word_embeddings": False}
OTHER |= {"pad_token_id": 4, "sep_token_id": 5, "num_labels": 3, "attention_window": 4}
CONFIGS = {"a window for each layer": SMALL, "own word table, padding 4": OTHER}
HEADS = ["Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"]


@dataclass
class LongTwin(Twin):
    """chosen: global tokens that ours is called with; None leaves them to the task.  backend: of its windows."""

    chosen: Tensor | None = None
    backend: str = "auto"

    def ours(self, dtype: torch.dtype, **more: Any) -> Model:
        model = super().ours(dtype, **more)
        for block in model.tower.depth:
            block.attention.backend = self.backend
        if self.chosen is not None:

            def choose(_: object, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, Any]:
                return args, given | {"global_attention_mask": self.chosen}

            model.register_forward_pre_hook(choose, with_kwargs=True)
        return model


def twin_of(head: str, config: str, directory: Path) -> LongTwin:
    values = CONFIGS[config] | ({"num_labels": 2} if head == "ForQuestionAnswering" else {})
    return LongTwin("Longformer" + head, LongformerConfig(**values), directory)


def inputs(side: str, config: str = "a window for each layer", *, separated: bool = False) -> dict[str, Tensor]:
    """Thirteen texts of 17 ids. separated: each has the three separators that transformers wants of a question."""
    pad, separator = CONFIGS[config]["pad_token_id"], CONFIGS[config].get("sep_token_id", 2)
    given = texts(31, side, length=17, pad=pad, first=7)
    given.pop("position_ids", None)
    if separated:
        mask = given.get("attention_mask", torch.ones_like(given["input_ids"], dtype=torch.bool))
        mask = mask if side == "none" else mask | (torch.arange(17) < 7)
        given["input_ids"] = torch.where(given["input_ids"] == pad, 8, given["input_ids"]).where(mask, pad)
        given["input_ids"][torch.arange(13), torch.arange(13) % 3 + 1] = separator
        given["input_ids"][torch.arange(13), torch.arange(13) % 3 + 2] = separator
        given["input_ids"][torch.arange(13), mask.sum(1) - 1] = separator
        given |= {} if side == "none" else {"attention_mask": mask}
    kinds = CONFIGS[config]["type_vocab_size"]
    types = torch.randint(0, kinds, given["input_ids"].shape, generator=torch.Generator().manual_seed(5))
    return given if side == "none" else {**given, "token_type_ids": types}


def chosen_tokens(kind: str) -> Tensor:
    """some: of the thirteen texts each has another number of global tokens, two have none.  alike: 3 and 11."""
    if kind == "alike":
        return ((torch.arange(17) == 3) | (torch.arange(17) == 11)).expand(13, -1)
    drawn = torch.rand(13, 17, generator=torch.Generator().manual_seed(23)) < 0.2
    drawn[[4, 9]] = False
    return drawn


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("head", HEADS)
def test_every_head_computes_what_transformers_computes(head, config, dtype, tmp_path):
    """Global tokens as the task has them: none, the first one, or the question."""
    twin = twin_of(head, config, tmp_path)
    for side in ("none", "right"):
        assert_same(twin, dtype, inputs(side, config, separated=head == "ForQuestionAnswering"))


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["some", "alike"])
@pytest.mark.parametrize("config", CONFIGS)
def test_global_tokens_compute_what_transformers_computes(config, kind, dtype, tmp_path):
    for head in ("ForMaskedLM", "ForQuestionAnswering") if kind == "some" else ("Model",):
        twin = twin_of(head, config, tmp_path / head)
        twin.chosen = chosen_tokens(kind)
        for side in ("none", "right"):
            assert_same(twin, dtype, inputs(side, config), {"global_attention_mask": twin.chosen.long()})


@pytest.mark.parametrize("length", [1, 4, 5, 12, 23])
def test_any_length_is_read(length, tmp_path):
    twin = twin_of("ForMaskedLM", "a window for each layer", tmp_path)
    given = texts(31, length=length, first=7)
    twin.chosen = torch.arange(length).expand(13, -1) == length // 2
    assert_same(twin, torch.float64, given, {"global_attention_mask": twin.chosen.long()}, gradients=False)


def test_a_long_text_computes_what_transformers_computes(tmp_path):
    """With hidden tiles skipped; the second text is padded, and has fewer global tokens."""
    values = {"attention_window": [64, 128, 32], "max_position_embeddings": 619}
    twin = LongTwin("LongformerForMaskedLM", LongformerConfig(**SMALL | values), tmp_path, backend="sparse")
    ids = torch.randint(7, 47, (2, 613), generator=torch.Generator().manual_seed(3))
    mask = torch.arange(613) < torch.tensor([[613], [487]])
    twin.chosen = torch.zeros(2, 613, dtype=torch.bool)
    twin.chosen[0, [0, 5, 300]] = twin.chosen[1, [486]] = True
    given = {"input_ids": ids.where(mask, 1), "attention_mask": mask}
    assert_same(twin, torch.float64, given, {"global_attention_mask": twin.chosen.long()})


@pytest.mark.parametrize("dilation", [2, 3])
def test_dilated_windows_read_a_text_as_texts_interleaved(dilation, tmp_path):
    """transformers has no dilation; but every third token by itself is a text with an undilated window."""
    twin = twin_of("ForMaskedLM", "a window for each layer", tmp_path)
    model = load(change(tmp_path, attention_dilation=[dilation] * 3), dtype=torch.float64)
    ids = torch.randint(7, 47, (5, 23), generator=torch.Generator().manual_seed(3))
    ours = model(ids).logits
    for first in range(dilation):
        part = slice(first, None, dilation)
        with widened(), torch.no_grad():
            theirs = twin.truth(input_ids=ids[:, part], position_ids=torch.arange(2, 25)[part].expand(5, -1)).logits
        torch.testing.assert_close(ours[:, part], theirs)


@pytest.mark.parametrize("head", HEADS)
def test_what_we_save_transformers_opens(head, tmp_path):
    twin = twin_of(head, "a window for each layer", tmp_path / "theirs")
    given = inputs("right", separated=head == "ForQuestionAnswering")
    assert_saved(twin, tmp_path / "ours", given)
    assert load(tmp_path / "ours").family.title == "Longformer"


@pytest.mark.parametrize("head", [head for head in HEADS if head != "ForQuestionAnswering"])
def test_the_side_of_padding_changes_nothing(head, tmp_path):
    model = twin_of(head, "a window for each layer", tmp_path).ours(torch.float64)
    assert_side_of_padding_changes_nothing(model, pad=1)


def test_padding_on_the_left_of_a_question_changes_nothing(tmp_path):
    model = twin_of("ForQuestionAnswering", "a window for each layer", tmp_path).ours(torch.float64)
    ids = torch.tensor([[0, 9, 8, 2, 2, 7, 11, 2]])
    left = torch.cat([torch.full((1, 3), 1), ids], 1)
    mask = torch.arange(11)[None] >= 3
    torch.testing.assert_close(model(left, mask).start_logits[:, 3:], model(ids).start_logits, rtol=0, atol=1e-13)


# ------------------------------------------------------------------------------------------------------- global tokens


def test_the_first_token_of_a_text_to_classify_is_global(tmp_path):
    model = twin_of("ForSequenceClassification", "a window for each layer", tmp_path).ours(torch.float64)
    ids = inputs("none")["input_ids"]
    first = torch.zeros_like(ids, dtype=torch.bool)
    first[:, 0] = True
    assert torch.equal(model(ids).logits, model(ids, global_attention_mask=first).logits)
    assert not torch.allclose(model(ids).logits, model(ids, global_attention_mask=~first).logits)


def test_a_question_is_global_and_one_separator_is_enough(tmp_path):
    model = twin_of("ForQuestionAnswering", "a window for each layer", tmp_path).ours(torch.float64)
    ids = torch.tensor([[0, 9, 8, 2, 7, 11, 12, 13], [0, 2, 8, 7, 7, 11, 12, 2]])
    question = torch.arange(8) < torch.tensor([[3], [1]])
    assert torch.equal(model(ids).end_logits, model(ids, global_attention_mask=question).end_logits)


@pytest.mark.parametrize("head", HEADS)
def test_a_model_can_be_pickled_and_copied(head, tmp_path):
    model = twin_of(head, "a window for each layer", tmp_path).ours(torch.float64)
    given = inputs("right", separated=True)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(other(**given).last_hidden_state, model(**given).last_hidden_state)


def test_a_question_without_a_separator_is_refused(tmp_path):
    model = twin_of("ForQuestionAnswering", "a window for each layer", tmp_path).ours(torch.float32)
    ids, mask = torch.tensor([[0, 9, 2, 7], [0, 9, 8, 2]]), torch.tensor([[True] * 4, [True, True, True, False]])
    with pytest.raises(ValueError, match=r"text.*1.*id.*2.*global_attention_mask="):
        model(ids, mask)
    assert model(ids, mask, global_attention_mask=ids == 0).start_logits.shape == (2, 4)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (torch.zeros(2, 5), r"\(2, 5\).*torch.float32.*\(2, 5\)"),
        (torch.full((2, 5), 2), r"torch.int64.*2"),
        (torch.zeros(2, 4, dtype=torch.bool), r"\(2, 5\).*torch.bool.*\(2, 4\)"),
        ([3], r"\(2, 5\).*list"),
    ],
)
def test_global_tokens_that_do_not_fit_are_refused(wrong, said, tmp_path):
    model = twin_of("Model", "a window for each layer", tmp_path).ours(torch.float32)
    with pytest.raises(ValueError, match=said):
        model(torch.full((2, 5), 7), global_attention_mask=wrong)


def test_roles_made_once_serve_many_calls(tmp_path):
    model = LongTwin("LongformerModel", LongformerConfig(**SMALL), tmp_path).ours(torch.float64)
    ids = torch.randint(5, 47, (2, 17), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(17) < torch.tensor([[17], [11]])
    chosen = torch.arange(17)[None] < torch.tensor([[1], [3]])
    roles = Roles.of(mask, chosen)
    expected = model(ids, mask, global_attention_mask=chosen).last_hidden_state
    for _ in range(2):
        assert torch.equal(model(ids, mask, global_attention_mask=roles).last_hidden_state, expected)
    with pytest.raises(ValueError, match="another attention_mask"):
        model(ids, global_attention_mask=roles)
    with pytest.raises(ValueError, match="another attention_mask"):
        model(ids, torch.arange(17) < torch.tensor([[17], [12]]), global_attention_mask=roles)
    with pytest.raises(ValueError, match="another attention_mask"):
        model(ids, mask, global_attention_mask=Roles.of(None, chosen))
    with pytest.raises(ValueError, match="2 batch rows, but the call has 1"):
        model(ids[:1], mask[:1], global_attention_mask=roles)
    with pytest.raises(ValueError, match=r"17.*16"):
        model(ids[:, :16], mask[:, :16], global_attention_mask=roles)


def test_roles_cannot_be_made_while_a_graph_is_captured(tmp_path, monkeypatch):
    model = LongTwin("LongformerModel", LongformerConfig(**SMALL), tmp_path).ours(torch.float32)
    monkeypatch.setattr("regard.models.text.being_captured", lambda x: True)
    ids = torch.randint(5, 47, (1, 17), generator=torch.Generator().manual_seed(0))
    chosen = torch.arange(17)[None] < 2
    model(ids)
    model(ids, global_attention_mask=Roles.of(None, chosen))
    with pytest.raises(ValueError, match=r"Roles\.of"):
        model(ids, global_attention_mask=chosen)


def test_padding_is_never_global(tmp_path):
    model = twin_of("Model", "a window for each layer", tmp_path).ours(torch.float64)
    ids, mask = torch.full((2, 9), 7), torch.arange(9) < torch.tensor([[9], [5]])
    chosen = (torch.arange(9) == 2) | (torch.arange(9) == 7)
    found = model(ids, mask, global_attention_mask=chosen.expand(2, -1)).last_hidden_state
    torch.testing.assert_close(
        found[1, :5],
        model(ids[1:, :5], global_attention_mask=chosen[None, :5]).last_hidden_state[0],
        rtol=0,
        atol=1e-13,
    )


def test_positions_and_types_are_checked_as_in_any_text_model(tmp_path):
    model = twin_of("Model", "a window for each layer", tmp_path).ours(torch.float32)
    ids = torch.full((1, 5), 7)
    assert model.max_positions == 31 - 2
    with pytest.raises(ValueError, match=r"30.*29.*positions"):
        model(torch.full((1, 30), 7))
    with pytest.raises(ValueError, match=r"position_ids.*0.*28.*0.*29"):
        model(ids, position_ids=torch.tensor([0, 1, 2, 3, 29]))
    with pytest.raises(ValueError, match=r"token_type_ids.*0.*2"):
        model(ids, token_type_ids=torch.full((1, 5), 3))
    counted = model(ids, position_ids=torch.arange(5)).last_hidden_state
    assert torch.equal(counted, model(ids).last_hidden_state)


# ------------------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"attention_window": 5}, r"attention_window.*5"),
        ({"attention_window": [2, 4]}, r"attention_window.*2.*3"),
        ({"attention_window": 0}, r"attention_window.*1"),
        ({"attention_window": [2, 0, 4]}, r"attention_window.*1"),
        ({"attention_dilation": [1, 2]}, r"attention_dilation.*2.*3"),
        ({"attention_dilation": 0}, r"attention_dilation.*1"),
        ({"attention_mode": "n2"}, r"attention_mode.*'n2'.*'longformer'"),
        ({"ignore_attention_mask": True}, r"ignore_attention_mask.*True.*False"),
        ({"position_embedding_type": "relative_key"}, r"position_embedding_type.*'relative_key'.*'absolute'"),
        ({"is_decoder": True}, r"is_decoder.*True.*False"),
        ({"adapters": "two"}, r"Longformer.*adapters.*'two'"),
        ({"architectures": ["LongformerForMultipleChoice"]}, "LongformerForMultipleChoice"),
    ],
)
def test_a_setting_that_changes_the_maths_is_refused(values, said, tmp_path):
    twin_of("Model", "a window for each layer", tmp_path)
    with pytest.raises(ValueError, match=said):
        load(change(tmp_path, **values))


def test_the_settings_of_published_checkpoints_are_read(tmp_path):
    twin_of("ForSequenceClassification", "a window for each layer", tmp_path)
    more = {"attention_mode": "longformer", "ignore_attention_mask": False, "attention_dilation": [1, 3, 2]}
    model = load(change(tmp_path, **more, onnx_export=False, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.2))
    assert [block.attention.reach for block in model.tower.depth] == [2, 6, 3]
    assert [block.attention.dilation for block in model.tower.depth] == [1, 3, 2]
    assert {block.attention.dropout for block in model.tower.depth} == {0.2}
    assert {block.attention.whole.dropout for block in model.tower.depth} == {0.2}
    assert (model.head.before.p, model.head.dropout.p) == (0.3, 0.3)


# ----------------------------------------------------------------------------------------------------------- the layer


def layer_and_input(*, reach: int = 2, dilation: int = 1) -> tuple[SlidingAttention, Tensor, Tensor, Tensor]:
    """Two texts of 13, the second padded from 11 on; three global tokens and one."""
    torch.manual_seed(19)
    layer = SlidingAttention(21, 3, reach=reach, dilation=dilation).double()
    tokens = torch.arange(13) < torch.tensor([[13], [11]])
    chosen = torch.zeros(2, 13, dtype=torch.bool)
    chosen[0, [0, 5, 12]] = chosen[1, [3]] = True
    return layer, torch.randn(2, 13, 21, dtype=torch.float64), tokens, chosen


def by_head(x: Tensor) -> Tensor:
    return x.reshape(2, 13, 3, 7).transpose(1, 2)


def dense_weights(layer: SlidingAttention, x: Tensor, tokens: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The (2, 3, 13, 13) weights written out: of the local call, and of all rows as the global tokens would look."""

    def softmax(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
        return (q @ k.mT / 7**0.5).masked_fill(~seen[:, None], -torch.inf).softmax(-1).nan_to_num(0.0)

    far = torch.arange(13)[:, None] - torch.arange(13)
    near = (far.abs() <= layer.reach * layer.dilation) & (far % layer.dilation == 0)
    looking = (tokens & ~chosen)[:, :, None]
    (q, k, _), whole_k = layer.project(x), layer.whole.w_kv(x)[..., :21]
    local = softmax(q, k, (near | chosen[:, None]) & tokens[:, None] & looking)
    whole = softmax(by_head(layer.whole.w_q(x)), by_head(whole_k), (tokens[:, None] & chosen[:, :, None]))
    return local, whole


@pytest.mark.parametrize(("reach", "dilation"), [(2, 1), (2, 3), (3, 2), (1, 12), (20, 1)])
def test_the_layer_is_what_dense_weights_make(reach, dilation):
    layer, x, tokens, chosen = layer_and_input(reach=reach, dilation=dilation)
    local, whole = dense_weights(layer, x, tokens, chosen)
    v, v_whole = layer.project(x)[2], by_head(layer.whole.w_kv(x)[..., 21:])
    expected = layer.w_o((local @ v + whole @ v_whole).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, mask=Roles.of(tokens, chosen)), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("backend", ["reference", "tiled", "sdpa", "flex", "sparse"])
@torch.no_grad()  # FlexAttention has no backward on the CPU
def test_every_backend_computes_the_same(backend):
    layer, x, tokens, chosen = layer_and_input(dilation=3)
    other = SlidingAttention(21, 3, reach=2, dilation=3, backend=backend).double()
    other.load_state_dict(layer.state_dict())
    told = []
    regard.op.observe(note := lambda call, name, out: told.append(name))
    made = other(x, mask=Roles.of(tokens, chosen))
    regard.op.unobserve(note)
    assert told == [backend, backend]
    torch.testing.assert_close(made, layer(x, mask=Roles.of(tokens, chosen)), rtol=0, atol=1e-13)


def test_without_roles_all_tokens_are_local():
    layer, x, _, _ = layer_and_input()
    nothing = torch.zeros(2, 13, dtype=torch.bool)
    made = layer(x)
    assert torch.equal(made, layer(x, mask=Roles.of(None, nothing)))
    torch.testing.assert_close(layer(x[0]), made[0], rtol=0, atol=1e-13)
    local, _ = dense_weights(layer, x, ~nothing, nothing)
    v = layer.project(x)[2]
    torch.testing.assert_close(made, layer.w_o((local @ v).transpose(1, 2).flatten(2)), rtol=0, atol=1e-13)


@pytest.mark.parametrize(("reach", "dilation"), [(2, 1), (2, 3)])
def test_views_are_the_dense_weights_with_zeros_elsewhere(reach, dilation):
    layer, x, tokens, chosen = layer_and_input(reach=reach, dilation=dilation)
    local, whole = dense_weights(layer, x, tokens, chosen)
    model = torch.nn.ModuleDict({"attention": layer})
    with torch.no_grad(), regard.watch(model, keep="qk") as seen:
        layer(x, mask=Roles.of(tokens, chosen))
    assert seen.names == ["attention", "attention.whole"]
    view, rows = seen["attention"], seen["attention.whole"]
    torch.testing.assert_close(view.tile(slice(None), slice(None)), local, rtol=0, atol=1e-14)
    assert torch.equal(view.tile(slice(None), slice(None)) == 0, local == 0)
    torch.testing.assert_close(view.row(8), local[:, :, 8], rtol=0, atol=1e-14)
    torch.testing.assert_close(view.received, local.sum(2), rtol=0, atol=1e-13)
    torch.testing.assert_close(rows.row(2)[0], whole[0, :, 12], rtol=0, atol=1e-14)
    torch.testing.assert_close(rows.row(0)[1], whole[1, :, 3], rtol=0, atol=1e-14)
    assert not rows.row(2)[1].any()  # the second text has one global token


def test_watching_changes_no_bit(tmp_path):
    model = twin_of("ForSequenceClassification", "a window for each layer", tmp_path).ours(torch.float32)
    ids = inputs("none")["input_ids"]
    before = model(ids).logits
    with regard.watch(model) as seen:
        assert torch.equal(model(ids).logits, before)
    each = [f"tower.blocks.{i}.attention" for i in range(3)]
    assert seen.names == [name for path in each for name in (path, f"{path}.whole")]


def test_gradients_reach_every_projection():
    layer, x, tokens, chosen = layer_and_input()
    layer(x, mask=Roles.of(tokens, chosen)).sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in layer.parameters())
    layer.zero_grad()
    layer(x).sum().backward()
    assert all(p.grad is None for p in layer.whole.parameters())


def test_dropout_is_on_both_calls_in_training_only():
    layer, x, tokens, chosen = layer_and_input()
    layer.dropout, layer.whole.dropout = 0.25, 0.5
    told = []
    for train in (True, False):
        layer.train(train)
        regard.op.observe(note := lambda call, backend, out: told.append(call.dropout))
        layer(x, mask=Roles.of(tokens, chosen))
        regard.op.unobserve(note)
    assert told == [0.25, 0.5, 0.0, 0.0]


def test_a_sliding_window_has_neither_context_nor_cache():
    layer, x, _, _ = layer_and_input()
    for wrong in ({"context": x}, {"cache": GrowingCache()}):
        with pytest.raises(ValueError, match=r"context=.*cache="):
            layer(x, **wrong)


def test_a_mask_that_is_no_roles_is_refused():
    layer, x, _, _ = layer_and_input()
    with pytest.raises(TypeError, match=r"mask=.*Roles.of\(tokens, chosen\).*None"):
        layer(x, mask=masks.causal())


@pytest.mark.parametrize("name", ["reach", "dilation"])
@pytest.mark.parametrize(("wrong", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)])
def test_a_window_of_nothing_is_refused(name, wrong, error):
    with pytest.raises(error, match=rf"{name}.*window.*{wrong}"):
        SlidingAttention(6, 2, **({"reach": 2} | {name: wrong}))


def test_the_layer_says_what_it_is():
    assert repr(SlidingAttention(6, 2, reach=3, dilation=2)).startswith(
        "SlidingAttention(\n  6, num_heads=2, head_dim=3, reach=3, dilation=2"
    )


# ----------------------------------------------------------------------------------------------------------- the masks


def test_roles_say_who_sees_whom():
    _, _, tokens, chosen = layer_and_input()
    roles = Roles.of(tokens, chosen)
    far = (torch.arange(13)[:, None] - torch.arange(13)).abs()
    expected = ((far <= 4) | chosen[:, None]) & tokens[:, None] & (tokens & ~chosen)[:, :, None]
    assert torch.equal(roles.local(4).dense(13)[:, 0], expected)
    assert torch.equal(
        roles.dense(13)[:, 0], (chosen[:, None] | chosen[:, :, None]) & tokens[:, None] & tokens[:, :, None]
    )
    assert roles.whole is not None
    assert torch.equal(
        roles.whole.dense(3, 13)[:, 0], (torch.arange(3) < torch.tensor([[3], [1]]))[:, :, None] & tokens[:, None]
    )
    assert roles.places[0].tolist() == [0, 5, 12]
    assert roles.places[1, 0] == 3
    assert repr(roles) == "Roles(tokens=<2×13 booleans, 24 True>, chosen=<2×13 booleans, 4 True>)"


def test_roles_cost_no_more_than_they_say():
    nothing = torch.zeros(2, 5, dtype=torch.bool)
    assert Roles.of(None, nothing).local(2) == masks.window(2, 2)
    first = Roles.of(None, (torch.arange(5) == 0).expand(2, -1))
    assert (first.leading, first.local(2).leading, first.whole, first.places.tolist()) == ((1, 1), (1, 1), None, [[0]])
    assert first.local(2) is first.local(2)  # layers share what backends keep with a mask


def test_tiles_are_hidden_where_nobody_looks():
    chosen = (torch.arange(4096) == 0)[None]
    kinds = Roles.of(None, chosen).local(64).tiles(4096, size=128)[0, 0]
    assert kinds.shape == (32, 32)
    band = (torch.arange(32)[:, None] - torch.arange(32)).abs() <= 1
    assert torch.equal(kinds != masks.EMPTY, band | (torch.arange(32) == 0))


def test_roles_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"4.*5"):
        Roles.of(torch.ones(2, 4, dtype=torch.bool), torch.zeros(2, 5, dtype=torch.bool))
    three = Roles.of(None, torch.tensor([[True, False], [False, True], [True, True]]))
    with pytest.raises(ValueError, match=r"3.*2"):
        three.fit(2, 1, 2, 2)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 13])
def test_tiles_agree_with_cells(size):
    _, _, tokens, chosen = layer_and_input()
    roles = Roles.of(tokens, chosen)
    for mask in (roles, roles.local(2), roles.local(2, 3), masks.queries(tokens)):
        cells = mask.dense(13)[:, 0]
        for b, text in enumerate(mask.tiles(13, size=size)[:, 0].tolist()):
            for r, row in enumerate(text):
                for c, kind in enumerate(row):
                    tile = cells[b, r * size : (r + 1) * size, c * size : (c + 1) * size]
                    assert (kind != masks.EMPTY) or not tile.any()
                    assert (kind != masks.FULL) or tile.all()
