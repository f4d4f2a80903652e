"""transformers.Trainer on our recipes' batches: a regard model has the losses of the same model of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from training_twins import ROWS, built, objective, opened
from twins import widened

from regard.training.recipes.recipe import Batch

STEPS = 5


class Recorder(transformers.Trainer):
    """Keeps the loss of each call in full: the log has it in fp32."""

    def compute_loss(self, *args: Any, **options: Any) -> Tensor:
        loss = super().compute_loss(*args, **options)
        self.losses = [*getattr(self, "losses", []), float(loss.detach())]
        return loss


def losses(model: nn.Module, collate: Callable[[list[int]], Batch], folder: Path, **options: Any) -> list[float]:
    """The loss of each call by a Trainer whose rows are numbers."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=ROWS // 2,
        learning_rate=1e-2,
        save_strategy="no",
        report_to=[],
        remove_unused_columns=False,
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    trainer = Recorder(model=model, args=arguments, train_dataset=list(range(ROWS)), data_collator=collate)
    trainer.train()
    return trainer.losses


@pytest.mark.parametrize(
    ("family", "name", "options"),
    [
        ("gpt2", "clm", {}),
        ("llama", "clm", {"gradient_accumulation_steps": 2}),  # BERT's and T5's means are added up by Trainer
        ("bert", "mlm", {}),
        ("bert", "next-sentence", {}),
        ("albert", "sentence-order", {}),
        ("bert", "text-classification", {}),
        ("t5", "translate", {}),
        ("t5", "span-corruption", {}),
        ("bart", "infilling", {}),
        ("vit", "image-classification", {}),
    ],
    ids=lambda value: str(value or "") if not isinstance(value, dict) else "accumulated" if value else "",
)
def test_losses_of_a_trainer_are_those_of_transformers(family, name, options, tmp_path):
    learnt = objective(name)
    ours = built(family, learnt.task)
    theirs = opened(ours, tmp_path / "model")
    if family == "gpt2":  # it shifts its labels without saying so, and Trainer would count each row's first
        theirs.loss_type = "ForCausalLM"
    batches: dict[tuple[int, ...], Batch] = {}

    def collate(numbers: list[int]) -> Batch:
        return batches.setdefault(tuple(numbers), learnt.batch(numbers))

    def collate_again(numbers: list[int]) -> Batch:
        batch = batches[tuple(numbers)]  # the same ones: Trainer orders rows by its own seed
        return {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}

    mine = losses(ours, collate, tmp_path / "ours", **options)
    with widened():
        expected = losses(theirs, collate_again, tmp_path / "theirs", **options)
    assert len(expected) == STEPS * options.get("gradient_accumulation_steps", 1)
    assert max(expected) - min(expected) > 0.05
    torch.testing.assert_close(mine, expected, rtol=1e-9, atol=0)
