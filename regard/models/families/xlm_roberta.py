"""XLM-RoBERTa (Conneau et al. 2019): RoBERTa trained on a hundred languages.

Peculiar: nothing but its vocabulary, and the names of its classes in `transformers`.
"""

from __future__ import annotations

from dataclasses import replace

from regard.models.families import roberta

__all__ = ["FAMILY"]

FAMILY = replace(
    roberta.FAMILY,
    title="XLM-RoBERTa",
    model_type="xlm-roberta",
    tasks={name: replace(task, architecture=f"XLM{task.architecture}") for name, task in roberta.FAMILY.tasks.items()},
)
