"""Options of the commands that write, in the words of a language: how many tokens, and how they are chosen.

A command still says which of them it takes, of which type, and their defaults. This file does not know any command.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer
from typer.models import OptionInfo

from regard.cli.language import Lang, speaker

if TYPE_CHECKING:
    from regard.models.model import Model
    from regard.models.verbs.wishes import Wishes

__all__ = ["WritingOptions", "refuse_idle_seed", "writing_options_in"]


@dataclass(frozen=True, kw_only=True)
class WritingOptions:
    """What typer is told of each option, but for its type and its default; they mean what `Model.generate`'s mean."""

    new_tokens: OptionInfo
    temperature: OptionInfo
    top_k: OptionInfo
    top_p: OptionInfo
    min_p: OptionInfo
    repetition_penalty: OptionInfo
    beams: OptionInfo
    seed: OptionInfo
    stop: OptionInfo


def writing_options_in(lang: Lang) -> WritingOptions:
    """The options, with help in a language.

    >>> writing_options_in("en").beams.help
    'Beam search; 1 is none.'
    """
    say = speaker(lang)
    return WritingOptions(
        new_tokens=typer.Option(metavar="N", help=say("At most so many.", "새 토큰의 최대 개수.")),
        temperature=typer.Option(metavar="T", help=say("0 takes the likeliest token.", "0이면 가장 그럴듯한 토큰.")),
        top_k=typer.Option(metavar="K", help=say("Draw among the K likeliest.", "상위 K개에서 뽑기.")),
        top_p=typer.Option(metavar="P", help=say("Draw among those that reach P.", "누적 확률 P까지에서 뽑기.")),
        min_p=typer.Option(
            metavar="P", help=say("Draw above P of the likeliest's chance.", "최고 확률의 P배 이상에서 뽑기.")
        ),
        repetition_penalty=typer.Option(metavar="X", help=say("Above 1 repeats less.", "1보다 크면 반복을 줄입니다.")),
        beams=typer.Option(metavar="K", help=say("Beam search; 1 is none.", "빔 탐색. 1이면 안 함.")),
        seed=typer.Option(metavar="N", help=say("The same draws again.", "같은 난수로 다시 뽑기.")),
        stop=typer.Option(
            metavar="TEXT", help=say("Ends the text; may be given again.", "텍스트를 끝내는 문자열(여러 번 가능).")
        ),
    )


def refuse_idle_seed(model: "Model", wishes: "Wishes") -> None:
    """Raise ValueError for a seed where nothing is drawn, neither by the wishes nor by the checkpoint's settings."""
    from regard.models.verbs.writing import defaults_of

    if wishes.seed is not None and not wishes.choice(defaults_of(model, wishes)).samples:
        raise ValueError(
            f"--seed {wishes.seed} is of draws, and here the likeliest token is taken: leave it out, or draw with "
            "--temperature, --top-k, --top-p or --min-p"
        )
