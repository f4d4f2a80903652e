"""Options that several commands share, and the language they speak."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, get_args

import typer
from typer.models import OptionInfo

if TYPE_CHECKING:
    from regard.generation.config import GenerationConfig
    from regard.models.model import Model

Lang = Literal["en", "ko"]
Say = Callable[[str, str], str]
"""say(english, korean) gives the one that is spoken."""


def known(lang: str) -> Lang:
    """A language that is spoken here.

    >>> known("ko")
    'ko'

    Raises ValueError with the languages there are.
    """
    for name in get_args(Lang):
        if name == lang:
            return name  # type: ignore[no-any-return]
    raise ValueError(f"--lang must be {' or '.join(get_args(Lang))}, got {lang!r}")


def speaker(lang: Lang) -> Say:
    """The function that chooses between two versions of a sentence.

    >>> speaker("ko")("queries", "쿼리")
    '쿼리'
    """
    return lambda english, korean: korean if lang == "ko" else english


def preferred(arguments: Sequence[str], environment: Mapping[str, str]) -> Lang:
    """The language of `--lang` where it is given, otherwise that of the locale. Help needs it before options are read.

    >>> preferred(["mask", "causal"], {"LANG": "ko_KR.UTF-8"}), preferred(["--lang", "en"], {"LANG": "ko_KR.UTF-8"})
    ('ko', 'en')

    arguments: as typed.  environment: LC_ALL, LC_MESSAGES or LANG names the locale, the first that is set; LANGUAGE
    lists what is liked better, between colons, and is not read where the locale is C, as GNU gettext has it.
    """
    pairs = pairwise(["", *arguments])  # each argument after the one before it
    asked = [this.removeprefix("--lang=") for before, this in pairs if before == "--lang" or this.startswith("--lang=")]
    locale = next((environment[name] for name in ("LC_ALL", "LC_MESSAGES", "LANG") if environment.get(name)), "")
    own = _language(locale)
    liked = (
        [] if own in ("", "c", "posix") else [_language(name) for name in environment.get("LANGUAGE", "").split(":")]
    )
    spoken = [name for name in (liked if any(liked) else [own]) if name in get_args(Lang)]
    return "ko" if [*asked[-1:], *spoken, "en"][0] == "ko" else "en"


def _language(locale: str) -> str:
    """The language of a locale, without country, encoding and variant.

    >>> _language("ko_KR.UTF-8"), _language("kok_IN"), _language("C.UTF-8")
    ('ko', 'kok', 'c')
    """
    return re.split("[_.@]", locale)[0].lower()


@dataclass(frozen=True, kw_only=True)
class SharedOptions:
    """What typer is told of each option, but for its type and its default.

    model: --model, a directory or a hub id.  ignore: --ignore, keys of its files to go on without.
    device: --device, where the model runs.  dtype: --dtype, of its weights.  json: --json, a switch.
    lang: --lang, of what is printed.
    """

    model: OptionInfo
    ignore: OptionInfo
    device: OptionInfo
    dtype: OptionInfo
    json: OptionInfo
    lang: OptionInfo


def options_in(lang: Lang) -> SharedOptions:
    """The options, with help in a language.

    >>> from typing import Annotated
    >>> options = options_in("en")
    >>> def command(model: Annotated[str, options.model], device: Annotated[str, options.device] = "cpu") -> None: ...
    >>> options.device.metavar, options.device.help
    ('DEVICE', 'cpu, cuda, cuda:1, …')
    """
    say = speaker(lang)
    return SharedOptions(
        model=typer.Option(metavar="DIR|ID", help=say("A directory, or a hub id.", "폴더 또는 허브 id.")),
        ignore=typer.Option(
            metavar="KEY", help=say("Of config files, left out; may be given again.", "무시할 설정 키(여러 번 가능).")
        ),
        device=typer.Option(metavar="DEVICE", help=say("cpu, cuda, cuda:1, …", "cpu, cuda, cuda:1 등.")),
        dtype=typer.Option(metavar="DTYPE", help="float32, float64, bfloat16, float16."),
        json=typer.Option("--json", help=say("As JSON.", "JSON으로 출력합니다.")),
        lang=typer.Option(metavar="en|ko", help=say("Language of the text.", "출력 언어.")),
    )


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


def refuse_idle_seed(model: "Model", config: "GenerationConfig") -> None:
    """Raise ValueError for a seed where nothing is drawn, neither by the options nor by the checkpoint's settings."""
    from regard.generation.text import merged_config

    if config.seed is not None and not merged_config(model, config).samples:
        raise ValueError(
            f"--seed {config.seed} is of draws, and here the likeliest token is taken: leave it out, or draw with "
            "--temperature, --top-k, --top-p or --min-p"
        )
