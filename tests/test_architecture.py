"""The budgets of CONTRIBUTING.md as tests. Every exception stands here by name, with its reason.

A violation that is not listed fails, and so does a listed one that is gone. Imports between folders
are import-linter's part (`make check`, pyproject.toml).
"""

import ast
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Mapping
from graphlib import TopologicalSorter
from io import StringIO
from pathlib import Path

import pytest

from tests.source_tree import (
    NODES,
    PRODUCT,
    ROOT,
    Function,
    comments_and_code,
    functions,
    imports,
    listed,
    module_of,
    nesting,
    num_lines,
    parameters,
    sources,
    trees,
    words,
)
from tests.tree import TREE, tree_page

TEXTS = (".py", ".md", ".toml", ".yaml", ".yml", ".proto", ".jinja", "Makefile")

MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 600
MAX_NESTING = 3
MAX_PARAMETERS = 7
MAX_POSITIONAL = 3
MAX_VERBS = 7
FORBIDDEN_NAMES = {"utils.py", "helpers.py", "common.py", "misc.py"}
WORDS = (
    "journey legs leg blame front_door measured releaser tally desk keeper booked books junction"
)
HOUSE_WORDS = re.compile(rf"(?<![a-z])({'|'.join(WORDS.split())}|waking)(?![a-z])")
# Full-line comments per line of code, over everything and in each file of some length.
MIN_COMMENTS = 0.02
MIN_COMMENTS_PER_FILE = 0.01
LONG_FILE = 150
ROLES = {"kv_producer", "kv_consumer", "kv_both"}

TOO_MANY_PARAMETERS = {
    "engine/ops/gated_delta_rule/cuda.py::gated_delta_rule": "the operands of the recurrence",
    "engine/ops/gated_delta_rule/fast.py::chunk": "the operands of the recurrence",
    "engine/ops/gated_delta_rule/fast.py::gated_delta_rule": "the operands of the recurrence",
    "engine/ops/gated_delta_rule/naive.py::chunk": "the operands of the recurrence",
    "engine/ops/gated_delta_rule/native.py::__call__": "the operands of the recurrence",
    "engine/ops/paged_attention/fast.py::paged_attention": "the operands of attention",
    "engine/ops/selective_scan/fast.py::chunk": "the operands of the recurrence",
    "engine/ops/selective_scan/naive.py::chunk": "the operands of the recurrence",
    "engine/ops/ssd/fast.py::ssd_chunk": "the operands of the recurrence",
    "engine/ops/ssd/naive.py::ssd": "the operands of the recurrence",
    "engine/ops/ssd/naive.py::ssd_chunk": "the operands of the recurrence",
}
# Operators, layers and models take tensors in the order in which papers and torch write them.
POSITIONAL_TENSORS = ("engine/ops/", "engine/layers/", "engine/models/")
MANY_POSITIONAL = {
    "engine/native/recording.py::__torch_dispatch__": "the signature is torch's",
    "serving/api/chat_template.py::call_binop": "the signature is Jinja's",
}
BROAD_EXCEPTS = {
    "benchmarks/gpu/sheet.py::attempt": "what fails on a new device is a row of its phase",
    "deploy/actors.py::_serve": "border of a member's server: the member tells its error",
    "deploy/controller.py::run": "a cluster's only owner must not cease to look after it",
    "deploy/member.py::live": "border of Ray, whose errors have no common root",
    "deploy/ray_cluster.py::_run": "guard of the thread that calls Ray: the caller raises it",
    "connector/offload/worker.py::_load": "guard of a reader thread: the load fails",
    "serving/api/tokenizer.py::load_tokenizer": "the Rust library has no other class",
    "engine/async_engine.py::_run": "guard of the engine thread",
    "engine/worker/device_sampler.py::_plan": "what fails for one request ends that request",
    "engine/worker/model_runner.py::_read": "a failed forward pass ends its requests",
    "engine/worker/model_runner.py::launch": "a failed forward pass ends its requests",
    "engine/worker/sampler.py::sample": "what fails for one request ends that request",
    "serving/rpc/caller_requests.py::_run": "border of every request among those of one call",
    "serving/rpc/server.py::call": "border of every gRPC call",
}
LOCAL_IMPORTS = {
    "serving/telemetry/telemetry.py::__init__": "opentelemetry is optional and slow to import",
    "engine/model_files.py::_download": "huggingface_hub is optional and slow to import",
    "serving/show_plan.py::_free_bytes": "torch takes a second, which a plan on paper need not pay",
}
ROLE_PLACES = {
    "serving/api/schema.py": "who speaks in a chat: no role of a node",
    "serving/config.py": "declares the values of kv_role",
    "connector/pd/decode/admission.py": "the door: the one table of what a role refuses",
}

DEEPLY_NESTED = {
    "proxy/pd_flow.py::generate": "a request's attempts, prefill, decode and tokens, in one place",
}


def is_kernel(function: Function) -> bool:
    """True of functions that Triton compiles."""
    return any(ast.unparse(one).startswith("triton.") for one in function.decorator_list)


def assert_only(found: Iterable[str], exceptions: Mapping[str, str]) -> None:
    """Asserts that `found` is exactly what is listed: nothing new, and nothing out of date."""
    new, gone = set(found) - set(exceptions), set(exceptions) - set(found)
    assert not new, f"not allowed here: {', '.join(sorted(new))}"
    assert not gone, f"exceptions that nobody needs any more: {', '.join(sorted(gone))}"


# --- size --------------------------------------------------------------------------------------


def test_functions_are_short() -> None:
    lengths = {name: num_lines(function) for name, function in functions(*PRODUCT)}
    longest = {**lengths, **{name: num_lines(node) for name, node in functions("tests")}}
    assert_only([name for name, lines in longest.items() if lines > MAX_FUNCTION_LINES], {})


def test_files_are_short() -> None:
    files = sources(*PRODUCT, "tests")
    assert_only([name for name, text in files.items() if text.count("\n") > MAX_FILE_LINES], {})


def test_nesting_is_shallow() -> None:
    deep = [name for name, node in functions(*PRODUCT) if nesting(node) > MAX_NESTING]
    assert_only(deep, DEEPLY_NESTED)


def test_parameters_are_few_and_named_from_the_fourth_on() -> None:
    # A Triton kernel takes all that it reads as parameters, by position.
    plain = (item for item in functions(*PRODUCT) if not is_kernel(item[1]))
    given = {name: parameters(function) for name, function in plain}
    many = [name for name, (_, every) in given.items() if len(every) > MAX_PARAMETERS]
    assert_only(many, TOO_MANY_PARAMETERS)
    unnamed = [name for name, (first, _) in given.items() if len(first) > MAX_POSITIONAL]
    assert_only([n for n in unnamed if not n.startswith(POSITIONAL_TENSORS)], MANY_POSITIONAL)


def test_interfaces_have_few_verbs() -> None:
    wide = []
    for name, tree in trees(*PRODUCT).items():
        for node in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            bases = {ast.unparse(base) for base in node.bases}
            verbs = [item for item in node.body if isinstance(item, Function)]
            if bases & {"ABC", "Protocol"} and len(verbs) > MAX_VERBS:
                wide.append(f"{name}::{node.name}")
    assert_only(wide, {})


# --- imports -----------------------------------------------------------------------------------


def test_no_import_cycles() -> None:
    """Also not through imports in functions or under TYPE_CHECKING: `prepare` raises CycleError."""
    modules = {module_of(name): tree for name, tree in trees(*PRODUCT).items()}
    graph = {
        module: {used for used in imports(tree) if used in modules and used != module}
        for module, tree in modules.items()
    }
    TopologicalSorter(graph).prepare()


def test_imports_stand_at_the_top() -> None:
    local = [
        name
        for name, function in functions(*NODES)
        if any(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(function))
    ]
    assert_only(local, LOCAL_IMPORTS)


def test_the_proxy_runs_without_torch() -> None:
    code = "import sys, proxy.__main__; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_proto_stays_a_folder_of_text() -> None:
    """With an `__init__.py` it would hide another distribution's package of that name."""
    assert [path.suffix for path in (ROOT / "proto").iterdir() if path.suffix == ".py"] == []


def test_package_files_are_empty() -> None:
    files = sources(*PRODUCT)
    assert_only([name for name in files if name.endswith("__init__.py") and files[name]], {})
    assert_only([name for name in sources("tests") if name.endswith("__init__.py")], {})


# --- what may not be written -------------------------------------------------------------------


def test_files_are_named_for_their_subject() -> None:
    names = [name for name in sources(*PRODUCT, "tests") if Path(name).name in FORBIDDEN_NAMES]
    assert_only(names, {})


def test_names_are_the_field_s() -> None:
    """Checks names of files and all names in them; HandOver and hand_over are the same words."""
    found = set()
    for file, text in sources(*NODES, "deploy").items():
        tokens = tokenize.generate_tokens(StringIO(text).readline)
        names = {token.string for token in tokens if token.type == tokenize.NAME}
        for name in (*names, *file.removesuffix(".py").split("/")):
            words = re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower()
            if HOUSE_WORDS.search(words):
                found.add(f"{name} in {file}")
    assert_only(found, {})


def test_roles_are_looked_at_in_one_place() -> None:
    """A role is a matter of one request: producer and consumer are classes, not branches."""
    found = []
    for name, tree in trees(*NODES).items():
        words = {str(n.value) for n in ast.walk(tree) if isinstance(n, ast.Constant)} & ROLES
        compared = (node for node in ast.walk(tree) if isinstance(node, ast.Compare))
        words |= set(re.findall(r"\b(?:kv_)?role\b", " ".join(map(ast.unparse, compared))))
        if words or "kv_role" in {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}:
            found.append(name)
    assert_only(found, ROLE_PLACES)


def test_broad_excepts_stand_at_borders_only() -> None:
    """Cleaning up and raising again is no handling; anything else broad hides a bug."""
    broad = []
    for name, function in functions(*PRODUCT):
        for node in ast.walk(function):
            if isinstance(node, ast.ExceptHandler) and is_broad(node):
                broad.append(name)
    # A nested function is found in the one around it too.
    assert_only([name for name in broad if not name.endswith("::_with_border")], BROAD_EXCEPTS)


def is_broad(handler: ast.ExceptHandler) -> bool:
    caught = ast.unparse(handler.type) if handler.type else "BaseException"
    last = handler.body[-1]
    raises_again = isinstance(last, ast.Raise) and last.exc is None
    return bool({"Exception", "BaseException"} & set(re.findall(r"\w+", caught))) and not (
        raises_again
    )


@pytest.mark.parametrize(
    ("banned", "folders", "exceptions"),
    [
        (
            {"os.environ", "os.getenv", "os.putenv", "os.environb"},
            PRODUCT,
            {
                "benchmarks/gpu/transports.py": "settings of UCX for processes that it starts",
                "connector/transports/nixl.py": "one setting of UCX, which NIXL cannot be given",
                "connector/transports/nixl_owner.py": "a program of its own, with its own __main__",
                "serving/cli.py": "an empty variable of a flag, which click takes for none",
                "engine/weights/digest.py": "the user's cache folder, also of Ray's actors",
            },
        ),
        ({"hasattr", "setattr(self", "globals", "eval", "exec"}, PRODUCT, {}),
        ({"pickle", "marshal", "shelve"}, PRODUCT, {}),
        ({"unittest.mock", "mocker", "MagicMock"}, (*PRODUCT, "tests"), {}),
    ],
    ids=["environment outside __main__", "probing", "pickle", "mocks"],
)
def test_words_that_may_not_be_used(
    banned: set[str], folders: tuple[str, ...], exceptions: dict[str, str]
) -> None:
    using = [name for name, tree in trees(*folders).items() if words(tree) & banned]
    assert_only([name for name in using if not name.endswith("__main__.py")], exceptions)


def test_no_path_of_a_machine_is_written_down() -> None:
    machine = re.compile(r"/(work|home|root|Users)[/]|/tmp[/]")
    texts = [path for path in listed(ROOT, deep=True) if path.name.endswith(TEXTS)]
    assert_only([str(path) for path in texts if machine.search(path.read_text())], {})


# --- documentation -----------------------------------------------------------------------------


def test_every_file_says_what_it_is_for() -> None:
    everything = trees(*PRODUCT, "tests")
    assert_only(
        [n for n, tree in everything.items() if tree.body and not ast.get_docstring(tree)], {}
    )


def test_the_tree_is_written_down() -> None:
    assert TREE.read_text() == tree_page(), "run `make tree`, which is `python -m tests.tree`"


def test_documents_name_files_that_exist() -> None:
    missing = [
        f"{path} in {page.name}"
        for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))
        for path in re.findall(r"(?:`|\]\()((?:\w+/)+[\w.]*\.\w+|\w+\.md)", page.read_text())
        if not {"NAME.py", "naive.py"} & {Path(path).name}
        and not any((folder / path).exists() for folder in (page.parent, ROOT))
    ]
    assert_only(missing, {})


def test_docstrings_begin_with_one_line() -> None:
    ragged = []
    for name, tree in trees(*PRODUCT, "tests").items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | Function):
                lines = (ast.get_docstring(node) or "").splitlines()
                ragged += [name] if len(lines) > 1 and lines[1] else []
    assert_only(ragged, {})


def test_docstrings_begin_with_their_subject() -> None:
    vague = [
        f"{name}: {text.splitlines()[0]}"
        for name, tree in trees(*PRODUCT, "tests").items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | Function)
        and (text := ast.get_docstring(node) or "").startswith(("What ", "That ", "Those "))
    ]
    assert_only(vague, {})


def test_public_names_are_explained() -> None:
    bare = [
        f"{name}::{node.name}"
        for name, tree in trees(*NODES).items()
        for node in tree.body
        if isinstance(node, ast.ClassDef | Function)
        and not (node.name.startswith("_") or ast.get_docstring(node) or is_command(node))
    ]
    assert_only(bare, {})


def test_tricky_lines_have_comments() -> None:
    """Why it is so, beside the line; what a whole function is for stands in its docstring."""
    counts = {name: comments_and_code(text) for name, text in sources(*NODES, "deploy").items()}
    bare = [
        name
        for name, (comments, code) in counts.items()
        if code > LONG_FILE and comments < MIN_COMMENTS_PER_FILE * code
    ]
    assert_only(bare, {})
    comments, code = (sum(column) for column in zip(*counts.values(), strict=True))
    assert comments >= MIN_COMMENTS * code, (comments, code)


def is_command(node: ast.ClassDef | Function) -> bool:
    """A command explains itself in its `--help`."""
    return any(".command(" in ast.unparse(decorator) for decorator in node.decorator_list)
