"""The rules of the project, checked in the source: sizes, names, hidden imports, docstrings, options, title pages."""

import ast
import dataclasses
import pathlib
import re
import subprocess
from collections.abc import Iterator

import pytest

from meshtrain.config.schema import Config
from meshtrain.sharding.rules import AXES, batch_axes
from scripts.benchmarks import reference

pytestmark = pytest.mark.quick

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE_FOLDER = ROOT / "meshtrain"
PACKAGE = sorted(PACKAGE_FOLDER.rglob("*.py"))
CONFIGS = sorted((ROOT / "configs").glob("*.py"))
SCRIPTS = [*(ROOT / "scripts").iterdir(), *(ROOT / "scripts" / "benchmarks").glob("*.py")]

FILE_LINES = 600
FUNCTION_LINES = 60
LONGER_FUNCTIONS = {"meshtrain/step/step.py": 100}
# `--help` must answer before JAX is imported; and functions of one's own are in modules that a configuration names.
LAZY_IMPORTERS = {
    "meshtrain/__main__.py",
    "meshtrain/__init__.py",
    "meshtrain/probe/bench_collectives.py",
    "meshtrain/probe/doctor.py",
    "meshtrain/user_functions.py",
}
CONFIG_READER = "meshtrain/cli/flags.py"  # --config names a Python file that the user has written
# Who reads the configuration: packages and files; all others are given what they need.
READS_CONFIGURATION = {"agree", "assembly", "config", "examples", "lab", "plan", "probe", "report", "run"}
READS_CONFIGURATION |= {f"{name}.py" for name in ("__init__", "evaluate", "explain", "generate", "main", "training")}
READS_CONFIGURATION |= {"harness.py", "hugging_face.py"}
FIELDS = {field.name for field in dataclasses.fields(Config)}
TOP_LEVEL = {
    ".ci",
    ".gitignore",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "Dockerfile",
    "LICENSE",
    "MANIFEST.in",
    "README.md",
    "SECURITY.md",
    "configs",
    "constraints.txt",
    "docs",
    "meshtrain",
    "pyproject.toml",
    "scripts",
    "setup.py",
    "tests",
}
# The only places of files that are not text: pictures, a data set that comes with the package, with its source,
# small models with their logits, and a run of a former version.
NOT_TEXT = ("docs/", "meshtrain/examples/digits/", "tests/hf/fixtures/", "tests/run/fixtures/")
BATCH = batch_axes()
# The table of rules says which axes split which dim, and is where a list of them belongs.
AXES_LISTED = {"meshtrain/sharding/rules.py": {"('pipeline', 'tensor')"}}
FORBIDDEN_NAMES = {"common", "helper", "helpers", "misc", "util", "utils"}
CODE_IN_DATA = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
README = (ROOT / "README.md").read_text(encoding="utf-8")
TITLE_PAGE = ("Purpose:", "Parameters:", "Expected:", "Time:", "Hardware:", "Command:")
# In two halves, so that this file does not find itself.
MACHINE_WORDS = re.compile(
    r"/(?:wor" + r"k|ro" + r"ot|home/\w+)/|/opt/(?:whe" + r"els|py" + r"pi)|pypi\.or" + r"g|pythonhoste" + r"d"
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


def parsed(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def public(tree: ast.Module) -> Iterator[Function]:
    """The functions of a module, and the methods of its classes, that carry a public name."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    for holder in (tree, *classes):
        for node in holder.body:
            if isinstance(node, Function) and not node.name.startswith("_"):
                yield node


def long_files(path: pathlib.Path) -> list[str]:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    return [f"{lines} lines in one file; at most {FILE_LINES}"] if lines > FILE_LINES else []


def long_functions(path: pathlib.Path) -> list[str]:
    most = LONGER_FUNCTIONS.get(name_of(path), FUNCTION_LINES)
    return [
        f"{node.lineno}: {node.name} has {lines} lines; at most {most}"
        for node in functions(parsed(path))
        if (lines := node.end_lineno - node.lineno + 1) > most
    ]


def hidden_imports(path: pathlib.Path) -> list[str]:
    """Imports of our own modules inside functions, by statement or through importlib."""
    found = []
    for function in functions(parsed(path)):
        for node in ast.walk(function):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = ["meshtrain" if node.level else node.module or ""]
            elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in (
                "import_module",
                "__import__",
            ):
                modules = [] if name_of(path) in LAZY_IMPORTERS else ["meshtrain"]
            if any(module.split(".")[0] == "meshtrain" for module in modules):
                found.append(f"{node.lineno}: {ast.unparse(node)} inside {function.name}")
    return found


def second_defaults(path: pathlib.Path) -> list[str]:
    return [
        f"{node.lineno}: {ast.unparse(node)}: a default stands in one place, with its option"
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "get"
        and len(node.args) + len(node.keywords) > 1
    ]


def undocumented(path: pathlib.Path) -> list[str]:
    tree = parsed(path)
    found = [] if ast.get_docstring(tree) else ["1: the module says nothing about itself"]
    for node in public(tree):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        bare = [a.arg for a in arguments if a and a.annotation is None and a.arg not in ("self", "cls")]
        if bare or node.returns is None:
            found.append(f"{node.lineno}: {node.name}: not annotated: {', '.join(bare) or 'what it returns'}")
        if not ast.get_docstring(node):
            found.append(f"{node.lineno}: {node.name}: no docstring")
    return found


def stubs(path: pathlib.Path) -> list[str]:
    """Functions that do nothing yet; the body of a Protocol's method or an overload is `...` for good."""
    tree = parsed(path)
    declared = {
        method
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases)
        for method in node.body
    }
    found = []
    for node in functions(tree):
        body = [part for part in node.body if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))]
        is_empty = not body or all(isinstance(part, ast.Pass) for part in body)
        is_declaration = node in declared or any("overload" in ast.unparse(part) for part in node.decorator_list)
        if (is_empty and not is_declaration) or any("NotImplemented" in ast.unparse(part) for part in body):
            found.append(f"{node.lineno}: {node.name}: a stub")
    return found


def odd_options(path: pathlib.Path) -> list[str]:
    """Fields of an options class that are neither an `option` of a plain type with one line of text, nor a group."""
    found = []
    for node in ast.walk(parsed(path)):
        if not (isinstance(node, ast.ClassDef) and node.name.endswith("Options")):
            continue
        for field in (part for part in node.body if isinstance(part, ast.AnnAssign)):
            where, group = f"{field.lineno}: {node.name}.{ast.unparse(field.target)}", ast.unparse(field.annotation)
            if group.endswith("Options"):  # a group, with its defaults
                if f"dataclasses.field(default_factory={group}" not in ast.unparse(field):
                    found.append(f"{where}: is not a group with default_factory={group}")
                continue
            if ast.unparse(field.annotation) not in ("int", "float", "bool", "str"):
                found.append(f"{where}: of type {ast.unparse(field.annotation)}")
            call = field.value
            if not (isinstance(call, ast.Call) and ast.unparse(call.func) == "option" and len(call.args) == 2):
                found.append(f"{where}: is not option(default, text)")
            elif not isinstance(call.args[1], ast.JoinedStr) and not is_one_line(call.args[1]):
                found.append(f"{where}: its text is not one line")
    return found


def is_one_line(node: ast.expr) -> bool:
    text = node.value if isinstance(node, ast.Constant) else None
    return isinstance(text, str) and text.strip() != "" and "\n" not in text


def executing_data(path: pathlib.Path) -> list[str]:
    """Ways of reading data that would run code found in it."""
    tree, found = parsed(path), []
    calls = ("eval", "exec", "yaml.load") if name_of(path) != CONFIG_READER else ("eval", "yaml.load")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found += [(node.lineno, name) for name in names if name.split(".")[0] in CODE_IN_DATA]
        if isinstance(node, ast.Call) and ast.unparse(node.func) in calls:
            found.append((node.lineno, ast.unparse(node.func)))
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            found.append((node.value.lineno, ast.unparse(node)))
    return [f"{line}: {what}: data must not be able to run code" for line, what in found]


def listed_axes(path: pathlib.Path) -> list[str]:
    """Lists of axes of the mesh, and products of their sizes, that should ask `sharding/rules.py` for a role."""
    found, allowed = [], AXES_LISTED[name_of(path)] if name_of(path) in AXES_LISTED else set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            named = [part.value for part in node.elts if isinstance(part, ast.Constant) and part.value in AXES]
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            named = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and part.value in BATCH]
            named += [part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute) and part.attr in BATCH]
        else:
            continue
        if len(set(named)) > 1 and ast.unparse(node) not in allowed:
            found.append(f"{node.lineno}: {ast.unparse(node)}: the axes of a role are what sharding/rules.py says")
    return found


def configuration_read_elsewhere(path: pathlib.Path) -> list[str]:
    """Imports of the package `config`, and fields of something called `config`, outside of the files that may."""
    if path.relative_to(PACKAGE_FOLDER).parts[0] in READS_CONFIGURATION:
        return []
    found = []
    for node in ast.walk(parsed(path)):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and node.attr in FIELDS:
            holder = ast.unparse(node.value).rpartition(".")[2]
            found += [f"{node.lineno}: {ast.unparse(node)}"] if holder == "config" else []
        if any(f"{module}.".startswith("meshtrain.config.") for module in modules):
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


RULES = [
    executing_data,
    configuration_read_elsewhere,
    long_files,
    long_functions,
    hidden_imports,
    second_defaults,
    undocumented,
    stubs,
    odd_options,
    listed_axes,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule):
    assert PACKAGE
    broken = [f"{name_of(path)}:{line}" for path in PACKAGE for line in rule(path)]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (configuration_read_elsewhere, "from meshtrain.config.schema import Config\n"),
        (configuration_read_elsewhere, "from meshtrain import config\n"),
        (configuration_read_elsewhere, "import meshtrain.config.resolve\n"),
        (configuration_read_elsewhere, "def f(config):\n    return config.seed\n"),
        (configuration_read_elsewhere, "def f(assembly):\n    return assembly.config.model.embed_dim\n"),
        (executing_data, "import pickle\n"),
        (executing_data, "from joblib import load\n"),
        (executing_data, "exec('1')\n"),
        (executing_data, "x = np.load('x', allow_pickle=True)\n"),
        (long_files, "x = 1\n" * (FILE_LINES + 1)),
        (long_functions, "def f():\n" + "    x = 1\n" * 60),
        (hidden_imports, "def f():\n    from meshtrain import trees\n"),
        (hidden_imports, "def f():\n    import json, meshtrain.trees\n"),
        (hidden_imports, "def f():\n    from . import trees\n"),
        (hidden_imports, "def f():\n    importlib.import_module('meshtrain.trees')\n"),
        (second_defaults, "x = options.get('size', 3)\n"),
        (undocumented, "x = 1\n"),
        (undocumented, '"""M."""\ndef f(x) -> int:\n    """F."""\n'),
        (undocumented, '"""M."""\ndef f(x: int):\n    """F."""\n'),
        (undocumented, '"""M."""\nclass C:\n    def f(self, x: int) -> int:\n        return x\n'),
        (stubs, "def f():\n    pass\n"),
        (stubs, 'def f():\n    """Later."""\n    ...\n'),
        (stubs, "def f():\n    raise NotImplementedError\n"),
        (odd_options, "class AOptions:\n    size: int = 3\n"),
        (odd_options, "class AOptions:\n    size: list = option(1, 'text')\n"),
        (odd_options, "class AOptions:\n    size: int = option(1, '')\n"),
        (odd_options, "class AOptions:\n    size: int = option(1, 'two\\nlines')\n"),
        (listed_axes, "order = ('data', 'pipeline', 'fsdp', 'tensor')\n"),
        (listed_axes, "split = ['fsdp', size, 'data']\n"),
        (listed_axes, "shards = shape['data'] * parts * shape['fsdp']\n"),
        (listed_axes, "shards = config.mesh.data * config.mesh.fsdp\n"),
    ],
)
def test_breaking_the_rule_is_noticed(rule, text, tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    monkeypatch.setitem(globals(), "PACKAGE_FOLDER", tmp_path)
    path = tmp_path / "sample.py"
    path.write_text(text)
    assert rule(path)


def test_exceptions_to_the_rules_are_still_needed_by_files_that_are_there():
    for name, listed in AXES_LISTED.items():
        written = {ast.unparse(node) for node in ast.walk(parsed(ROOT / name)) if isinstance(node, ast.Tuple)}
        assert listed <= written
    names = {name_of(path) for path in PACKAGE}
    assert {path.relative_to(PACKAGE_FOLDER).parts[0] for path in PACKAGE} >= READS_CONFIGURATION
    assert set(LONGER_FUNCTIONS) <= names
    assert names >= LAZY_IMPORTERS


def test_every_folder_is_a_package_and_says_what_it_holds():
    folders = {path.parent for path in PACKAGE}
    missing = [name_of(folder) for folder in folders if not (folder / "__init__.py").exists()]
    assert not missing, missing


def test_no_file_has_a_name_that_says_nothing():
    everything = [*PACKAGE, *CONFIGS, *SCRIPTS, *(ROOT / "tests").rglob("*.py")]
    vague = [name_of(path) for path in everything if FORBIDDEN_NAMES & set(re.split(r"[_.\-]", path.name))]
    assert not vague, vague


def test_what_is_tracked_belongs_to_the_project():
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    files = [pathlib.Path(name) for name in listed.stdout.split("\0") if (ROOT / name).is_file()]
    strays = {path.parts[0] for path in files} - TOP_LEVEL
    assert not strays, sorted(strays)
    elsewhere = [path for path in files if not path.as_posix().startswith(NOT_TEXT)]
    not_text = [path for path in elsewhere if b"\0" in (ROOT / path).read_bytes()]
    assert not not_text, not_text


def test_nothing_names_the_machine_it_was_written_on():
    files = [*PACKAGE, *CONFIGS, *(ROOT / "tests").rglob("*.py"), *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    files += [*SCRIPTS, ROOT / "pyproject.toml", ROOT / ".ci" / "run"]
    found = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in files
        if path.is_file()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if MACHINE_WORDS.search(line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_has_a_title_page(path):
    title = ast.get_docstring(parsed(path)) or ""
    missing = [word for word in TITLE_PAGE if not re.search(rf"^{word} *\S", title, re.MULTILINE)]
    assert not missing, f"{name_of(path)} does not say: {', '.join(missing)}"
    assert f"--config={name_of(path)}" in title, "its command starts another configuration"
    assert not long_files(path)


def test_the_index_lists_every_page():
    docs = ROOT / "docs"
    index = (docs / "index.md").read_text(encoding="utf-8")
    made = {f"reference/{name}" for name in reference.PAGES}
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")} - {"index.md", *made}
    assert set(re.findall(r"^\| \[[^]]+\]\(([^)]+)\)", index, re.MULTILINE)) == pages


def test_the_code_map_of_readme_is_made_of_the_first_lines_of_the_packages():
    said = {path.parent.name: ast.get_docstring(parsed(path)) or "" for path in PACKAGE_FOLDER.glob("*/__init__.py")}
    assert {package: text for package, text in said.items() if len(text.splitlines()) > 10} == {}
    [block] = re.findall(r"^## The code\n.*?^```\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert dict(line.split(maxsplit=1) for line in block.splitlines()) == {
        package: text.splitlines()[0] for package, text in said.items()
    }
    assert len(README.splitlines()) <= 230


def test_there_are_configurations():
    assert CONFIGS


def test_only_errors_writes_the_form_of_an_error_line():
    """Other modules pass the parts to `Problem`, so that code reads its attributes instead of the text."""
    written = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "meshtrain").rglob("*.py")
        if path.name != "errors.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "; allowed" in node.value
        if ">>>" not in node.value
    ]
    assert written == []
