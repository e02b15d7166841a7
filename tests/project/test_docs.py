"""docs/cases.md names tests that exist, for every case once."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from benchmarks.results import how, load, markdown, put
from benchmarks.rows import MAIN
from dcptool.checkpoint.findings import Finding
from dcptool.checkpoint.kinds import KINDS, Kind, Severity
from dcptool.frameworks.profile import Extra, Needed, Profile
from dcptool.frameworks.table import PROFILES
from dcptool.ops.verify.verdict import State
from dcptool.words import listed
from tests.conftest import ROOT

ROW = re.compile(r"\| ([NR]\d\d[ab]?|[A-K]-[a-z-]+) \| (.+?) \| (.+) \|")


FILES = {path.name: path for path in sorted((ROOT / "tests").rglob("test_*.py"))}


@cache
def functions_of(file: str) -> frozenset[str]:
    """Names of the tests of a file, those of classes with the class before them."""
    if file not in FILES:
        return frozenset()
    tree = ast.parse(FILES[file].read_text())
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return frozenset(found)


def test_no_two_files_of_tests_have_one_name():
    """They are cited by name alone, wherever they lie."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_every_case_has_tests_and_every_test_of_a_case_is_listed():
    rows = ROW.findall((ROOT / "docs" / "cases.md").read_text())
    names = [name for name, *_ in rows]
    assert names == sorted(set(names))
    assert len(names) == 114
    listed = {(name, test) for name, _, tests in rows for test in re.findall(r"`([^`]+)`", tests)}
    assert {name for name, _ in listed} == set(names)
    for name, test in listed:
        file, _, function = test.partition("::")
        assert function in functions_of(file), f"{name}: {test} is no test"
    for file in FILES:
        for function in functions_of(file):
            for letter, number in re.findall(r"(?:^|_)([nr])(\d\d[ab]?)(?=_)", function.rpartition("::")[2]):
                assert (f"{letter.upper()}{number}", f"{file}::{function}") in listed


def test_what_the_documents_cite_is_there():
    """Every `test_x.py::test_y` is a test, every `dcptool/...` and `tests/...` a file, every link leads somewhere."""
    cited = 0
    for document in (ROOT / "docs").glob("*.md"):
        text = document.read_text()
        for file, function in re.findall(r"`(?:tests/)?(test_\w+\.py)::([\w:]+)`", text):
            assert function in functions_of(file), f"{document.name}: {file}::{function} is no test"
            cited += 1
        for path in re.findall(r"`((?:dcptool|tests|fixtures|formats|training)/[\w./]+)`", text):
            within = ROOT if path.startswith(("dcptool/", "tests/", "fixtures/")) else ROOT / "dcptool"
            assert (within / path).exists(), f"{document.name}: {path} is not there"
            cited += 1
        for target in re.findall(r"\]\(([\w./]+)(?:#[\w-]+)?\)", text):
            assert (document.parent / target).exists(), f"{document.name}: {target} is not there"
    assert cited > 150


def reference() -> str:
    """The help of every command, as docs/commands.md has it."""
    import click

    from dcptool.cli import main

    parts = [
        "# Commands\n\nWhat `dcptool COMMAND --help` prints "
        "(written by `pytest tests/project/test_docs.py --update-golden`).\n"
    ]
    # With its parent: what the help option is called is inherited from there.
    parent = click.Context(main, info_name="dcptool", **main.context_settings)
    for name, command in main.commands.items():
        context = click.Context(command, parent, name, terminal_width=100, max_content_width=100)
        parts.append(f"## dcptool {name}\n\n```text\n{command.get_help(context)}\n```\n")
    return "\n".join(parts)


def test_the_command_reference_is_what_help_prints(pytestconfig):
    path = ROOT / "docs" / "commands.md"
    if pytestconfig.getoption("--update-golden"):
        path.write_text(reference())
    assert path.read_text() == reference()


def test_the_tables_of_speed_are_what_was_measured(pytestconfig):
    results = load(ROOT / "docs" / "speed.json")
    shown = [result for result in results if result.row in MAIN and result.medium == "disk"]
    assert [result.row for result in shown] == list(MAIN)
    for path, chosen in ((ROOT / "README.md", shown), (ROOT / "docs" / "speed.md", results)):
        if pytestconfig.getoption("--update-golden"):
            path.write_text(put(path.read_text(), chosen))
        assert markdown(chosen) in path.read_text()
        assert how(chosen) in path.read_text()


def kinds_in_code() -> set[str]:
    """Every word of the table of kinds that stands in code outside it."""
    table = ROOT / "dcptool" / "checkpoint" / "kinds.py"
    trees = (ast.parse(path.read_text()) for path in (ROOT / "dcptool").rglob("*.py") if path != table)
    return {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)} & KINDS.keys()


def table_of_kinds() -> str:
    """The table of kinds of findings, as docs/json.md has it."""
    rows = [f"| `{name}` | {kind.severity.value} | {_effect(kind)} | {kind.meaning} |" for name, kind in KINDS.items()]
    return "\n".join(["| kind | severity | state | means |", "|---|---|---|---|", *rows])


def _effect(kind: Kind) -> str:
    return kind.effect.value if kind.severity is Severity.ERROR else ""


def test_the_kinds_of_findings_are_those_of_the_table(pytestconfig):
    is_in_page("json.md", "kinds", table_of_kinds(), pytestconfig)


_IN_PAGE = {"rank": "N", "part": "N", "optim": "N", "world": "W", "mp": "MM", "model": "MM", "distributed": "MM"}
_IN_PAGE |= {
    "tag": "",
    "bf16": "[bf16_]",
    "split": "[zero_pp_rank_0_]",
    "role": "[actor/]",
    "item": "ITEM",
    "shard": "-I-of-N",
    "param": "NAME",
    "trained": "NAME",
}


def form_in_page(form: str) -> str:
    """A name of what is needed, as a page shows it."""
    for word, shown in _IN_PAGE.items():
        form = form.replace(f"{{{word}}}", shown)
    assert "{" not in form
    return f"`{form}`"


def sections_of_trainers() -> str:
    """What a step of each trainer consists of, as docs/trainers.md has it."""
    return "\n\n".join(map(section_of, PROFILES))


def section_of(profile: Profile) -> str:
    said = [f"Source: {profile.source}."]
    if profile.groups:
        said.append(f"A step to resume from has entries named {listed([f'`{name}`' for name in profile.groups], 9)}.")
    if profile.last_written:
        said.append(f"Last in a step: `{profile.last_written}`.")
    if profile.best:
        said.append(f"The best step: `{'.'.join(profile.best.keys)}` in `{profile.best.file}`.")
    if profile.counter:
        said.append(f"Numbers begin anew when a job goes on (`{profile.counter}`).")
    if profile.tracker:
        said.append(f"It finds its newest step by the number in `{profile.tracker}`, beside the steps.")
    if profile.elsewhere:
        said.append(f"On another number of data-parallel ranks it {profile.elsewhere}.")
    rows = [row_of(needed) for needed in profile.needed]
    rows += [of_extra(extra) for extra in profile.extras]
    table = ["| file | holds | needed | on another number of ranks |", "|---|---|---|---|", *rows] if rows else []
    return "\n".join([f"### {profile.name}", "", " ".join(said), *([""] if table else []), *table])


def of_extra(extra: Extra) -> str:
    pattern = extra.pattern.replace("|", "\\|")
    return f"| `{pattern}` | {extra.holds} | {'as beside' if extra.regular else '–'} | {extra.follows.value} |"


def row_of(needed: Needed) -> str:
    ways = list(dict.fromkeys(needed.follows(form).value for form in needed.names)) or ["–"]
    ways = [f"{way}, and begin it anew" if needed.anew and "none" in way else way for way in ways]
    when = "to resume" if needed.resumes else "always"
    when += f", beside `{needed.given}`" if needed.given else ""
    when += f", unless `{needed.unless}` is an entry" if needed.unless else ""
    forms = " or ".join(map(form_in_page, needed.names)) or "(never there)"
    return f"| {forms} | {needed.holds} | {when} | {' or '.join(ways)} |"


def test_what_trainers_need_is_what_their_profiles_say(pytestconfig):
    is_in_page("trainers.md", "trainers", sections_of_trainers(), pytestconfig)
    names = listed([profile.name for profile in PROFILES], len(PROFILES))
    is_in_page("verify.md", "trainers", f"{names}.", pytestconfig)


def is_in_page(page: str, name: str, table: str, pytestconfig: pytest.Config) -> None:
    """Assert that a table made from the code stands in a page between its marks; --update-golden puts it there."""
    path = ROOT / "docs" / page
    begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
    head, _, rest = path.read_text().partition(begin)
    if pytestconfig.getoption("--update-golden"):
        path.write_text(f"{head}{begin}{table}{end}{rest.partition(end)[2]}")
    assert f"{begin}{table}{end}" in path.read_text()


def test_every_kind_of_the_table_is_found_by_some_code():
    assert sorted(KINDS.keys() - kinds_in_code()) == []


def test_only_a_kind_of_the_table_can_be_found():
    with pytest.raises(KeyError, match="no-such-kind"):
        Finding.of("no-such-kind", "it is not in the table")
    made = [
        f"{path.name}:{node.lineno}"
        for path in (ROOT / "dcptool").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Finding"
    ]
    assert made == [], "made by Finding.of, which looks into the table"


def documented_tuples() -> list[ast.ClassDef]:
    """Classes of values whose docstring lists their attributes, in all modules."""
    trees = (ast.parse(path.read_text()) for path in (ROOT / "dcptool").rglob("*.py"))
    classes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    return [
        node
        for node in classes
        if "Attributes:" in (ast.get_docstring(node) or "")
        and any(isinstance(base, ast.Name) and base.id == "NamedTuple" for base in node.bases)
    ]


def test_where_attributes_are_listed_none_is_left_out():
    left_out = []
    for node in documented_tuples():
        listed = (ast.get_docstring(node) or "").partition("Attributes:")[2]
        fields = [item.target.id for item in node.body if isinstance(item, ast.AnnAssign)]  # type: ignore[union-attr]
        left_out += [f"{node.name}.{name}" for name in fields if not re.search(rf"\b{name}\b", listed)]
    assert left_out == []


def test_the_states_in_the_pages_are_those_there_are():
    said = (ROOT / "docs" / "json.md").read_text()
    [line] = [line for line in said.splitlines() if '"state": "complete | unmarked' in line]
    assert set(re.findall(r"[a-z-]+", line.partition(":")[2])) == {state.value for state in State}
    assert all(f"`{state.value}`" in (ROOT / "docs" / "verify.md").read_text() for state in State)
