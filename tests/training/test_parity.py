"""Training as transformers trains: loss and gradients of every objective, and twenty steps of AdamW, in fp64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax
from training_twins import END, ROWS, Objective, built, gradients_by_their_names, objective, opened
from twins import widened

from regard.models.encoder_decoder import shift_right
from regard.training.config import TrainConfig
from regard.training.loop import Run, make_optimizer
from regard.training.parallel import Processes
from regard.training.recipes import QuestionAnswering
from regard.training.recipes.recipe import Batch

CLASSIFIERS = ("bert", "roberta", "distilbert", "gpt2", "t5", "bart")
CASES = [
    *((family, "clm") for family in ("gpt2", "llama")),
    *((family, "mlm") for family in ("bert", "roberta", "distilbert", "albert", "electra", "longformer", "big_bird")),
    ("t5", "span-corruption"),
    ("bart", "infilling"),
    *((family, "translate") for family in ("marian", "t5")),
    *((family, "text-classification") for family in CLASSIFIERS),
    ("bert", "text-classification of pairs"),
    *((family, "token-classification") for family in CLASSIFIERS if family != "bart"),  # transformers has none
    *((family, "question-answering") for family in CLASSIFIERS),
    *((family, "image-classification") for family in ("vit", "dinov2", "swin")),
    ("clip", "contrastive"),
]
PAIRS = [("bert", "next-sentence"), ("albert", "sentence-order")]


def their_batch(batch: Batch) -> Batch:
    """transformers takes pixels in the dtype of its weights only."""
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


def assert_learns_the_same(
    family: str, learnt: Objective, their_loss: Callable[[nn.Module, Batch], Tensor], folder: Path
) -> None:
    """The recipe's loss over its count has the value and all gradients of `their_loss` of transformers' model."""
    ours = built(family, learnt.task)
    theirs = opened(ours, folder / "model")
    if family == "marian":  # its decoder starts with padding, and transformers gives no gradient to that vector
        for module in theirs.modules():
            if isinstance(module, nn.Embedding):
                module.padding_idx = None
    batch = learnt.batch()
    with widened():
        expected = their_loss(theirs, their_batch(batch))
        expected.backward()
    total, count = learnt.recipe.loss(ours, batch)
    loss = total / count
    loss.backward()
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)

    mine = gradients_by_their_names(ours, folder / "gradients")
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters() if parameter.requires_grad}
    assert mine.keys() == gradients.keys()
    slope = max(float(gradient.abs().max()) for gradient in gradients.values() if gradient is not None)
    assert slope > 1e-3
    for name, gradient in gradients.items():
        if family == "marian" and name.endswith("embed_positions.weight"):  # sines, which no checkpoint holds
            assert gradient is None
            continue
        expected = torch.zeros_like(mine[name]) if gradient is None else gradient
        # Terms of the size of the largest gradient cancel in each of them: to nothing in the bias of keys.
        torch.testing.assert_close(
            mine[name], expected, rtol=1e-9, atol=1e-12 * slope, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(("family", "name"), CASES)
def test_loss_and_gradients_are_those_of_transformers(family, name, tmp_path):
    learnt = objective(name, **{"smoothing": 0.0} if name == "translate" else {})

    def their_loss(model: Any, batch: Batch) -> Tensor:
        if name == "question-answering":  # row by row: in a batch, its softmax runs over padding too
            return torch.stack([model(**learnt.batch([number])).loss for number in range(ROWS)]).mean()
        return model(**batch, **{"return_loss": True} if name == "contrastive" else {}).loss

    assert_learns_the_same(family, learnt, their_loss, tmp_path)


@pytest.mark.parametrize(
    ("family", "name", "options"),
    [
        ("marian", "translate", {"smoothing": 0.1}),
        ("t5", "translate", {"smoothing": 0.3}),
        ("vit", "image-classification", {"smoothing": 0.1}),
        ("vit", "image-classification", {"mixup": 0.8}),
        ("swin", "image-classification", {"mixup": 0.8, "smoothing": 0.1}),
        ("deit", "image-classification", {}),  # transformers' class with both of DeiT's heads has no loss
    ],
)
def test_smoothed_and_mixed_labels_are_those_of_cross_entropy(family, name, options, tmp_path):
    learnt = objective(name, **options)

    def their_loss(model: Any, batch: Batch) -> Tensor:
        labels = batch["labels"]
        inputs = {"pixel_values": batch["pixel_values"]} if name == "image-classification" else batch
        logits, labels = model(**inputs).logits, labels if labels.is_floating_point() else labels.flatten()
        return cross_entropy(logits.flatten(0, -2), labels, label_smoothing=learnt.recipe.smoothing)

    assert_learns_the_same(family, learnt, their_loss, tmp_path)


@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_pairs_are_learnt_beside_hidden_tokens(family, name, tmp_path):
    """BERT adds two means; the recipe's weight of a pair is the number of tokens that a row hides on average."""
    learnt = objective(name)

    def both(model: Any, batch: Batch) -> Tensor:
        relation = batch.pop(name.replace("-", "_") + "_label")
        output = model(**batch)
        logits = output.sop_logits if family == "albert" else output.seq_relationship_logits
        labels = batch["labels"].flatten()
        weight = learnt.recipe.probability * learnt.recipe.length / (labels != -100).sum()
        hidden = cross_entropy(output.prediction_logits.flatten(0, 1), labels)
        return hidden + weight * cross_entropy(logits, relation, reduction="sum")

    assert_learns_the_same(family, learnt, both, tmp_path)
    # The model's own loss is transformers'.
    ours = built(family, "pretraining")
    theirs, batch = opened(ours, tmp_path / "again"), learnt.batch()
    with widened():
        expected = theirs(**batch).loss
    torch.testing.assert_close(ours(**batch).loss, expected, rtol=1e-9, atol=0)


def test_the_2017_transformer_learns_by_the_formula_of_its_paper():
    learnt = objective("translate", smoothing=0.1)
    model, batch = built("transformer", "text2text-generation"), learnt.batch()
    total, count = learnt.recipe.loss(model, batch)
    total.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()

    labels, real = batch["labels"], batch["labels"] != -100
    assert int(count) == int(real.sum()) < labels.numel()
    shifted = shift_right(labels.where(real, END), model.start)  # what follows the end is not learnt from
    logits = model(batch["input_ids"], batch["attention_mask"], decoder_input_ids=shifted).logits
    surprise = -log_softmax(logits, -1)
    right = surprise.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    expected = (0.9 * right + 0.1 * surprise.mean(-1))[real].sum()
    expected.backward()
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(case for case in CASES if case[1] != "contrastive"),  # a row's negatives are the rest of its batch
        *PAIRS,
        ("transformer", "translate"),
        ("deit", "image-classification"),
    ],
)
def test_the_loss_of_a_batch_is_the_sum_of_its_rows(family, name):
    """Whatever the padding: accumulation and data parallelism split a batch anywhere."""
    learnt = objective(name)
    model = built(family, learnt.task)
    with torch.no_grad():
        total, count = learnt.recipe.loss(model, learnt.batch())
        parts = [learnt.recipe.loss(model, learnt.batch([number])) for number in range(ROWS)]
    assert int(count) == sum(int(part[1]) for part in parts)
    torch.testing.assert_close(total, torch.stack([part[0] for part in parts]).sum(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_questions_reach_models_with_and_without_segments(family):
    model = built(family, "question-answering", vocab_size=300)
    learnt = QuestionAnswering.for_model(model, length=30)
    row = {"question": "where?", "context": "it is in Paris", "answer": "Paris"}
    batch = learnt.batch(learnt.rows([row], model, training=True), [])
    assert ("token_type_ids" in batch) == (family in ("bert", "roberta"))  # with two segments in training_twins
    total, _ = learnt.loss(model, batch)
    assert 0 < float(total.detach()) < 10


@pytest.mark.parametrize(
    ("family", "name"),
    [("gpt2", "clm"), ("bert", "mlm"), ("t5", "span-corruption"), ("vit", "image-classification")],
)
def test_twenty_steps_of_adamw_have_the_losses_of_a_plain_loop(family, name, tmp_path):
    learnt = objective(name)
    config = TrainConfig(steps=20, learning_rate=1e-2, warmup=4, weight_decay=0.1, clip=0.5)
    ours = built(family, learnt.task)
    theirs = opened(ours, tmp_path)
    run = Run(ours, learnt.recipe, make_optimizer(ours, config), config, Processes(0, 1, ours.device, None))
    groups = [
        {"params": [parameter], "weight_decay": config.weight_decay if parameter.squeeze().ndim >= 2 else 0.0}
        for parameter in theirs.parameters()  # squeezed: a class token is (1, 1, d) there
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: config.learning_rate_at(step) / config.learning_rate
    )
    losses, expected, norms = [], [], []
    for step in range(config.steps):
        numbers = [(3 * step + place) % ROWS for place in range(4)]
        batch = learnt.batch(numbers, seed=step)
        run.step(step, [batch])
        losses.append(float(run.loss))
        with widened():
            loss = theirs(**their_batch(batch)).loss
            loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(theirs.parameters(), config.clip)))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        expected.append(float(loss.detach()))
    assert max(expected) - min(expected) > 0.1
    assert max(norms) > config.clip
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=0)
