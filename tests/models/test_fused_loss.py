"""A language model's loss without its logits equals that of the logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from regard.models import losses
from regard.models.losses import IGNORED, LinearCrossEntropy, linear_token_loss, token_loss
from regard.models.model import Model
from regard.testing import assert_rule
from regard.training.recipes import CausalLM, MaskedLM, Translation
from regard.training.recipes.mlm import SegmentPairs
from regard.training.recipes.recipe import loss_options

V, N, B = 37, 11, 3
SIZES = {
    "vocab_size": V, "hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 17,
    "max_position_embeddings": 23,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2, tied": ("gpt2", {"vocab_size": V, "n_embd": 12, "n_layer": 1, "n_head": 3, "n_positions": 23}),
    "llama, untied": ("llama", SIZES | {"tie_word_embeddings": False}),
    "bert, transform and bias": ("bert", SIZES),
    "t5, scale": (
        "t5",
        {"vocab_size": V, "d_model": 12, "d_kv": 4, "d_ff": 17, "num_layers": 1, "num_heads": 3},
    ),
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "CELLS", 5 * V)


def build(name: str, **options: Any) -> Model:
    family, config = MODELS[name]
    task = {"bert": "fill-mask", "t5": "text2text-generation"}.get(family, "text-generation")
    model = regard.build(family, task=options.pop("task", task), seed=3, **config | options)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():  # biases, too
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()  # no dropout


def batch() -> dict[str, Tensor]:
    torch.manual_seed(5)
    labels = torch.randint(V, (B, N))
    labels[torch.rand(B, N) < 0.4] = IGNORED
    return {"input_ids": torch.randint(V, (B, N)), "labels": labels}


def gradients(model: Model, inputs: dict[str, Tensor], **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    output = model(**inputs, **options)
    assert (output.logits is None) == options.get("skip_logits", False)
    assert output.loss is not None
    output.loss.backward()
    return output.loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def rows(dtype: torch.dtype, *, bias: bool = True) -> tuple[list[Tensor], Tensor]:
    """Hidden states, matrix, bias and labels; odd sizes, the last piece shorter."""
    torch.manual_seed(2)
    tensors = [torch.randn(B, N, 6), torch.randn(V, 6), *([torch.randn(V)] if bias else [])]
    labels = torch.randint(V, (B, N))
    labels[0, 2:7] = labels[2, -1] = IGNORED
    return [tensor.to(dtype).requires_grad_() for tensor in tensors], labels


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, **options: Any) -> Tensor:
    return token_loss(torch.nn.functional.linear(hidden, weight, bias), labels, **options)


def both(tensors: list[Tensor], labels: Tensor, loss: Any, **options: Any) -> list[Tensor]:
    hidden, weight, *bias = tensors
    total = loss(hidden, weight, bias[0] if bias else None, labels, **options)
    return [total.detach(), *torch.autograd.grad(total, tensors)]


def doubled(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("items", [None, 17])
@pytest.mark.parametrize("bias", [True, False])
def test_loss_and_gradients_are_those_of_the_logits(
    dtype: torch.dtype, smoothing: float, items: int | None, bias: bool
) -> None:
    tensors, labels = rows(dtype, bias=bias)
    options = {"smoothing": smoothing, "items": items}
    truth = both(doubled(tensors), labels, plain, **options)
    baseline, ours = both(tensors, labels, plain, **options), both(tensors, labels, linear_token_loss, **options)
    scale = max(float(gradient.abs().max()) for gradient in truth[1:])
    for number, values in enumerate(zip(ours, baseline, truth, strict=True)):
        assert values[0].dtype == values[1].dtype
        assert_rule(*values, gradient=number > 0, scale=scale if number else None, what=f"tensor {number}")


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_autocast(smoothing: float) -> None:
    tensors, labels = rows(torch.float32)
    truth = both(doubled(tensors), labels, plain, smoothing=smoothing, items=1)
    with torch.autocast("cpu", torch.bfloat16):
        baseline = both(tensors, labels, plain, smoothing=smoothing, items=1)
        ours = both(tensors, labels, linear_token_loss, smoothing=smoothing, items=1)
    scale = max(float(gradient.abs().max()) for gradient in truth[1:])
    for number, (one, other, true) in enumerate(zip(ours, baseline, truth, strict=True)):
        # One rounding step is bf16's, as in the products; the results are wider.
        steps = [value.to(torch.bfloat16) for value in (one, other)]
        assert_rule(*steps, true, gradient=number > 0, scale=scale if number else None, what=f"tensor {number}")
        assert one.dtype == other.dtype


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by the compiler
def test_a_compiled_loss_is_one_graph() -> None:
    tensors, labels = rows(torch.float64)
    compiled = torch.compile(linear_token_loss, backend="aot_eager", fullgraph=True)
    for one, other in zip(
        both(tensors, labels, compiled, smoothing=0.1),
        both(tensors, labels, linear_token_loss, smoothing=0.1),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by the compiler
def test_a_compiled_model_under_autocast() -> None:
    model, inputs = build("gpt2, tied"), batch()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        expected, wanted = gradients(model, inputs, skip_logits=True)
        wanted = {name: gradient.clone() for name, gradient in wanted.items()}
        loss, found = gradients(compiled, inputs, skip_logits=True)
    torch.testing.assert_close(loss, expected, rtol=2**-7, atol=0)
    assert {name.removeprefix("_orig_mod.") for name in found} == wanted.keys()


def test_without_labels_the_sum_is_zero_and_the_mean_is_nan() -> None:
    tensors, labels = rows(torch.float32)
    labels.fill_(IGNORED)
    assert all(float(value.abs().max()) == 0 for value in both(tensors, labels, linear_token_loss, items=1))
    assert both(tensors, labels, linear_token_loss)[0].isnan()
    model, inputs = build("bert, transform and bias"), batch()
    inputs["labels"].fill_(IGNORED)
    loss, found = gradients(model, inputs, skip_logits=True, num_items_in_batch=4)
    assert float(loss) == 0
    assert found.keys() == gradients(model, inputs, num_items_in_batch=4)[1].keys()


def test_frozen_weights_and_no_grad() -> None:
    tensors, labels = rows(torch.float64)
    hidden, weight, bias = tensors
    loss = linear_token_loss(hidden, weight.detach(), None, labels)
    (gradient,) = torch.autograd.grad(loss, [hidden])
    (expected,) = torch.autograd.grad(plain(hidden, weight.detach(), None, labels), [hidden])
    torch.testing.assert_close(gradient, expected, rtol=1e-13, atol=1e-14)
    with torch.no_grad():
        loss = linear_token_loss(hidden, weight, bias, labels)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, plain(hidden, weight, bias, labels).detach(), rtol=1e-13, atol=0)


def test_a_gradient_can_be_taken_twice() -> None:
    tensors, labels = rows(torch.float64)
    loss = linear_token_loss(*tensors, labels)
    first = torch.autograd.grad(loss, tensors, retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(2 * loss, tensors), strict=True):
        assert torch.equal(2 * one, other)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 5}, {"label_smoothing": 0.1}], ids=str)
@pytest.mark.parametrize("every_row", [True, False])
def test_models_without_logits(
    name: str, options: dict[str, Any], every_row: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if every_row:  # as on a GPU, where rows without a label are not left out
        monkeypatch.setattr("regard.checks.reading_waits", lambda x: True)
    model, inputs = build(name).double(), batch()
    expected, wanted = gradients(model, inputs, **options)
    wanted = {key: gradient.clone() for key, gradient in wanted.items()}
    loss, found = gradients(model, inputs, skip_logits=True, **options)
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    assert found.keys() == wanted.keys()
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[key], rtol=1e-11, atol=1e-13, msg=lambda text, key=key: key + text)


def test_pretraining_keeps_the_relation() -> None:
    model, inputs = build("bert, transform and bias", task="pretraining").double(), batch()
    inputs["next_sentence_label"] = torch.tensor([0, 1, 1])
    expected, _ = gradients(model, inputs)
    loss, _ = gradients(model, inputs, skip_logits=True)
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)


def test_an_adapter_on_the_head_is_called() -> None:
    model, inputs = build("llama, untied").double(), batch()
    assert model.head.words is not None
    model.head.words.register_forward_hook(lambda layer, given, result: result * 2)
    expected, _ = gradients(model, inputs)
    loss, _ = gradients(model, inputs, skip_logits=True)
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)


def test_labels_of_another_shape_and_beyond_the_vocabulary() -> None:
    model, inputs = build("gpt2, tied"), batch()
    with pytest.raises(ValueError, match=r"\(3, 11\).*\(3, 10\)"):
        model(inputs["input_ids"], labels=inputs["labels"][:, 1:], skip_logits=True)
    inputs["labels"][0, 1] = V
    with pytest.raises((IndexError, RuntimeError), match=str(V)):
        model(**inputs, skip_logits=True)


def test_recipes_skip_logits_in_training_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("token_loss", "linear_token_loss"):
        function = getattr(losses, name)
        monkeypatch.setattr(
            f"regard.models.losses.{name}", lambda *a, f=function, n=name, **k: (calls.append(n), f(*a, **k))[1]
        )
    model, inputs = build("gpt2, tied", embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0), batch()
    clm = CausalLM(length=N)
    trained = clm.loss(model.train(), inputs)[0]
    held_out = clm.loss(model.eval(), inputs)[0]
    torch.testing.assert_close(trained, held_out)
    translator = build("t5, scale", dropout_rate=0.0)
    recipe = Translation(length=N, end_token_id=1, pad_token_id=0, smoothing=0.1)
    smoothed, plainly = (recipe.loss(translator.train(mode), inputs)[0] for mode in (True, False))
    logits = translator(**inputs).logits
    torch.testing.assert_close(smoothed, token_loss(logits, inputs["labels"], smoothing=0.1, items=1))
    torch.testing.assert_close(plainly, token_loss(logits, inputs["labels"], items=1))
    assert calls[:4] == ["linear_token_loss", "token_loss", "linear_token_loss", "token_loss"]


class NoWaiting(TorchDispatchMode):
    """Raises where a GPU would make the host wait for it."""

    READING = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "is_nonzero", "unique")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masked = name == "index" and any(index is not None and index.dtype == torch.bool for index in args[1])
        if name in self.READING or masked:
            raise AssertionError(f"{func} reads values in a training step")
        return func(*args, **kwargs or {})


def padded() -> dict[str, Tensor]:
    inputs = batch()
    inputs["attention_mask"] = torch.ones(B, N, dtype=torch.long)
    inputs["attention_mask"][1, -4:] = 0
    inputs["labels"][1, -4:] = IGNORED
    return inputs


STEPS: dict[str, Any] = {
    "gpt2": (lambda: build("gpt2, tied"), batch),
    "gpt2, padded": (lambda: build("gpt2, tied"), padded),
    "bert, padded": (
        lambda: build("bert, transform and bias"),
        lambda: padded() | {"token_type_ids": torch.zeros(B, N, dtype=torch.long), "position_ids": torch.arange(N)},
    ),
    "gpt2, packed": (
        lambda: build("gpt2, tied"),
        lambda: batch() | {"document_ids": torch.arange(N).expand(B, N) // 4},
    ),
    "t5": (lambda: build("t5, scale"), padded),
    "vit": (
        lambda: regard.build(
            "vit",
            task="image-classification",
            num_labels=5,
            hidden_size=12,
            num_hidden_layers=1,
            num_attention_heads=3,
            intermediate_size=17,
            image_size=12,
            patch_size=4,
        ),
        lambda: {"pixel_values": torch.randn(B, 3, 12, 12), "labels": torch.tensor([0, 4, 2])},
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_training_step_on_a_gpu_waits_for_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.checks.reading_waits", lambda x: True)
    monkeypatch.setattr("regard.backends.sdpa.has_numbers", lambda x: False)  # what it reads on the CPU alone
    model, inputs = STEPS[name][0]().train(), STEPS[name][1]()
    options = {"skip_logits": True, "num_items_in_batch": 1} if "input_ids" in inputs else {}
    with NoWaiting():
        model(**inputs, **options).loss.backward()
    wrong = torch.full((B, N), V)
    if "input_ids" in inputs:  # the check comes back in eval mode
        with pytest.raises(ValueError, match=str(V)):
            model.eval()(**inputs | {"input_ids": wrong})


def test_only_positions_with_a_label_are_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.checks.reading_waits", lambda x: True)
    scored: list[int] = []
    forward = LinearCrossEntropy.forward
    counted = staticmethod(lambda ctx, hidden, *rest: (scored.append(len(hidden)), forward(ctx, hidden, *rest))[1])
    monkeypatch.setattr(LinearCrossEntropy, "forward", counted)
    model, inputs = build("bert, transform and bias").double(), padded()
    labels = int((inputs["labels"] != IGNORED).sum())
    expected, wanted = gradients(model, inputs, num_items_in_batch=7)
    wanted = {key: gradient.clone() for key, gradient in wanted.items()}
    for most in (labels, labels + 3, B * N, B * N + 50):
        loss, found = gradients(model, inputs, skip_logits=True, num_items_in_batch=7, max_labels=most)
        torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
        for key, gradient in found.items():
            torch.testing.assert_close(gradient, wanted[key], rtol=1e-11, atol=1e-13)
    assert scored == [labels, labels + 3, B * N, B * N]
    assert model(**inputs, skip_logits=True, max_labels=labels - 1).loss.isnan()


@pytest.mark.parametrize("pairs", [None, "next-sentence"])
def test_masked_lm_scores_few_rows(pairs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = MaskedLM(length=64, mask_token_id=4, vocab_size=V, special_ids=(0, 1, 2, 3, 4), pairs=pairs)
    task = "fill-mask" if pairs is None else "pretraining"
    undropped = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = build("bert, transform and bias", task=task, max_position_embeddings=64, **undropped)
    model = model.double().train()
    rng = [np.random.default_rng(row) for row in range(12)]
    text = [row.integers(5, V, 64) for row in rng]
    rows = [torch.from_numpy(ids) for ids in text]
    if pairs is not None:
        rows = SegmentPairs([[ids[:32], ids[32:]] for ids in text], pairs)
    inputs = recipe.batch(list(rows), rng)
    labels = int((inputs["labels"] != IGNORED).sum())
    assert labels <= recipe.max_labels(inputs["labels"]) < 0.5 * inputs["labels"].numel()
    expected, count = recipe.loss(model.eval(), inputs)
    monkeypatch.setattr("regard.checks.reading_waits", lambda x: True)
    loss, _ = recipe.loss(model.train(), inputs)
    assert int(count) == labels
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


COMPILED: dict[str, Any] = {
    "t5, scale": (padded, {"label_smoothing": 0.1}),
    "bert, transform and bias": (padded, {"max_labels": 25}),
    "gpt2, tied": (lambda: batch() | {"document_ids": torch.arange(N).expand(B, N) // 4}, {}),
}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by the compiler
@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_training_step_is_one_graph(name: str) -> None:
    model, inputs, options = build(name).double(), COMPILED[name][0](), COMPILED[name][1] | {"skip_logits": True}
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected, wanted = gradients(model, inputs, **options)
    wanted = {key: gradient.clone() for key, gradient in wanted.items()}
    loss, found = gradients(compiled, inputs, **options)
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[key.removeprefix("_orig_mod.")], rtol=1e-11, atol=1e-13)


def test_loss_options_look_through_wrappers() -> None:
    model = build("gpt2, tied").train()
    for wrapper in (model, torch.compile(model), torch.nn.Sequential(model)):
        assert loss_options(wrapper) == {"skip_logits": True}
    assert loss_options(model.eval(), smoothing=0.1) == {}
    classifier = build("bert, transform and bias", task="text-classification").train()
    assert loss_options(classifier, smoothing=0.1) == {"label_smoothing": 0.1}
