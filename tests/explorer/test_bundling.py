"""The page's modules as one script."""

import shutil
import subprocess

import pytest

from regard.explorer.export import bundle, scripted

node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the script")


def run(script: str) -> str:
    done = subprocess.run(["node", "--input-type=module"], input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def said(modules: dict[str, str], entry: str, what: str) -> str:
    """What an expression of the entry's exports, called `it`, is when the script has run."""
    script, name = bundle(modules, entry)
    return run(f"{script}\nconst it = {name};\nconsole.log(JSON.stringify({what}));")


@node
def test_every_form_of_import_and_export_gives_what_it_names():
    modules = {
        "a.js": """
export const two = 2;
export function three() { return two + 1; }
export async function four() { return 4; }
export class Five { value = 5; }
export function* six() { yield 6; }
""",
        "b.js": """
import { two } from './a.js';
import {
  three,
  Five as Fifth, six
} from "./a.js";
export const found = [two, three(), new Fifth().value, [...six()][0]];
export { two as deux, four } from "./a.js";
export default { seven: 7 };
""",
    }
    assert said(modules, "b.js", "[it.found, it.deux, await it.four(), it.default.seven]") == "[[2,3,5,6],2,4,7]"


@node
def test_names_of_one_module_do_not_reach_another():
    modules = {
        "a.js": "const hidden = 1;\nexport const shown = hidden;",
        "b.js": 'import { shown } from "./a.js";\nconst hidden = 2;\nexport const both = [shown, hidden];',
    }
    assert said(modules, "b.js", "it.both") == "[1,2]"


@node
def test_a_module_that_two_others_import_runs_once():
    modules = {
        "once.js": "globalThis.times = (globalThis.times ?? 0) + 1;\nexport const token = {};",
        "deep/a.js": 'import { token } from "../once.js";\nexport const ours = token;',
        "b.js": 'import { token } from "./once.js";\nexport const theirs = token;',
        "other/c.js": """
import { ours } from "../deep/a.js";
import { theirs } from "../b.js";
export const same = ours === theirs;
""",
    }
    assert said(modules, "other/c.js", "[it.same, globalThis.times]") == "[true,1]"


def test_types_imported_in_comments_are_no_imports():
    text = '/** @typedef {Map<string, import("./nowhere.js").Thing>} Things */\n// see import("./nowhere.js")\n'
    assert bundle({"a.js": text + "export const a = 1;"}, "a.js")[0].count("nowhere") == 1


def test_only_what_the_entry_needs_is_in_the_script():
    script, _ = bundle({"a.js": "export const a = 1;", "b.js": "export const unused = 2;"}, "a.js")
    assert "unused" not in script


def test_modules_in_a_circle_are_refused_and_named():
    cycle = {"a.js": "b.js", "b.js": "c.js", "c.js": "b.js"}
    modules = {path: f'import {{ x }} from "./{needed}";' for path, needed in cycle.items()}
    with pytest.raises(ValueError, match=r"b\.js.*c\.js.*b\.js"):
        bundle(modules, "a.js")


def test_a_module_that_is_not_there_is_named_with_who_wants_it():
    with pytest.raises(LookupError, match=r"'gone\.js'.*a\.js"):
        bundle({"a.js": 'import { x } from "./gone.js";'}, "a.js")
    with pytest.raises(LookupError, match=r"'gone\.js'.*a\.js"):
        bundle({"a.js": ""}, "gone.js")


@pytest.mark.parametrize(
    "asked", ["d3", "../secret.js", "./deep/../../secret.js", "https://example.org/a.js", "./a.json"]
)
def test_only_files_inside_the_page_can_be_imported(asked):
    with pytest.raises(ValueError, match=r"'\./name\.js'"):
        bundle({"a.js": f'import {{ x }} from "{asked}";'}, "a.js")


@pytest.mark.parametrize(
    "text",
    [
        "export let changing = 1;",
        "export var changing = 1;",
        "export const { a, b } = thing;",
        'const late = await import("./b.js");',
        "const here = import.meta.url;",
        'import "./b.js";',
        'import * as all from "./b.js";',
        'import some from "./b.js";',
        'import { a b-c } from "./b.js";',
        'export * from "./b.js";',
        "export { a };",
    ],
)
def test_forms_that_cannot_be_bundled_are_refused(text):
    with pytest.raises(ValueError, match=r"a\.js"):
        bundle({"a.js": text, "b.js": ""}, "a.js")


@node
def test_a_script_that_speaks_of_script_tags_cannot_end_its_own():
    script = 'console.log("</script>", `</SCRIPT >`, "<!--", /<\\/script>/.test("</script>"));'
    safe = scripted(script)
    assert "</script" not in safe.lower()
    assert "<!--" not in safe
    assert run(safe) == run(script) == "</script> </SCRIPT > <!-- true"


def test_types_in_comments_are_left_out_and_casts_are_not():
    text = "/**\n * @param {number} x\n */\nexport function f(x) {\n  /** @type {number} */ (x).y = 1; /** kept */\n}\n"
    script, _ = bundle({"a.js": text}, "a.js")
    assert "@param" not in script
    assert "  /** @type {number} */ (x).y = 1; /** kept */" in script
