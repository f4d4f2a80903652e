"""What a family's file says of it: how to build the model, how its weights are called, which tasks it has.

It does not know how a checkpoint is read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from regard.models.settings import Settings
from regard.models.sources import Names

if TYPE_CHECKING:
    from regard.models.model import Model

__all__ = ["Family", "Task"]


def as_given(settings: Settings, stored: Collection[str]) -> Settings:
    """The settings themselves: what most families make of the names in a checkpoint."""
    return settings


@dataclass(frozen=True, kw_only=True)
class Task:
    """One head of a family.

    architecture: the class in `transformers` that has this head, which config.json names.
    names: templates of the head's weights, from the root of the checkpoint.
    prefix: what stands before the body's weights beside this head; default what the family has.
    unused: regular expressions of tensors that this task does without, as the decoder where only the encoder is asked.
    copies: a tensor that a checkpoint may hold beside the shared one, or in its place → that one, which it must equal.
    """

    architecture: str
    names: Names = field(default_factory=dict)
    prefix: str | None = None
    unused: tuple[str, ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of models.

    title: for people.  model_type: as in config.json.
    prefix: what stands before the names of the body's weights in a checkpoint that has a head; "" for nothing.
    build: settings and task → the model, with weights of no value yet.
    names: settings → templates of the body's weights, without the prefix.
    tasks: by the name people ask for: none, fill, next, pretrain, classify, classify-cls, tag, answer, generate,
      encode, rebuild, caption, match.
    ignored: regular expressions of tensors that hold nothing learnt, or the same numbers as a shared one.
    copies: as in `Task`, of the body.
    renamed: endings of names in old checkpoints → what they are called now.
    moved: regular expressions of what stands before names, as other versions of `transformers` write it → what stands
      there now; one after another.
    harmless: keys of config.json that change nothing here.
    settle: settings and the names of the checkpoint's tensors → settings, where these know better (T5's word table).
    """

    title: str
    model_type: str
    prefix: str
    build: Callable[[Settings, str], Model]
    names: Callable[[Settings], Names]
    tasks: Mapping[str, Task]
    ignored: tuple[str, ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    moved: Mapping[str, str] = field(default_factory=dict)
    harmless: tuple[str, ...] = ()
    settle: Callable[[Settings, Collection[str]], Settings] = as_given

    def before(self, task: str) -> str:
        """What stands before the names of the body's weights in a checkpoint with this task's head, with its dot."""
        prefix = self.tasks[task].prefix
        prefix = self.prefix if prefix is None else prefix
        return prefix + "." if prefix and task != "none" else ""

    def task_of(self, architectures: object) -> str:
        """The task whose architecture config.json names; "none" if it names none.

        Raises ValueError for an architecture that the family does not have.
        """
        if not isinstance(architectures, list) or not architectures:
            return "none"
        for name, task in self.tasks.items():
            if task.architecture == architectures[0]:
                return name
        known = ", ".join(task.architecture for task in self.tasks.values())
        raise ValueError(
            f"the checkpoint is a {architectures[0]}, and {self.title} is supported as {known}. "
            "Name the task to read it as: regard.load(…, task='none') reads the body without a head"
        )
