"""Options of the commands that write about pictures, in the words of a language: how many tokens, and how chosen.

A command still says which of them it takes, of which type, and their defaults. This file does not know any command.
"""

from dataclasses import dataclass

import typer
from typer.models import OptionInfo

from regard.cli.language import Lang, speaker

__all__ = ["WritingOptions", "writing_options_in"]


@dataclass(frozen=True, kw_only=True)
class WritingOptions:
    """What typer is told of each option, but for its type and its default; they mean what `Model.generate`'s mean.

    ignore: --ignore, keys of the checkpoint's files to go on without.
    """

    new_tokens: OptionInfo
    temperature: OptionInfo
    top_k: OptionInfo
    top_p: OptionInfo
    beams: OptionInfo
    seed: OptionInfo
    ignore: OptionInfo


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
        beams=typer.Option(metavar="K", help=say("Beam search; 1 is none.", "빔 탐색. 1이면 안 함.")),
        seed=typer.Option(metavar="N", help=say("The same draws again.", "같은 난수로 다시 뽑기.")),
        ignore=typer.Option(metavar="KEY", help=say("Of config files, left out.", "무시할 설정 키.")),
    )
