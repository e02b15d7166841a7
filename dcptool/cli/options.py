"""Options several commands share, defined once."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from dcptool.checks.check import Level

Command = TypeVar("Command", bound=Callable[..., Any])

PATH = click.Path(readable=False)
"""A path or URL; whether it can be read is for the library to say, in its own words."""

_keys = click.option(
    "--keys", multiple=True, metavar="GLOB", help="Only entries whose whole name matches; * crosses dots. Repeatable."
)
_exclude = click.option(
    "--exclude", multiple=True, metavar="GLOB", help="Leave out entries with these names. Repeatable."
)


def _remembered(option: str, words: str) -> Callable[[Command], Command]:
    """Return a flag that no command is given; `wants_json` and `is_quiet` tell it."""

    def remember(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
        ctx.meta[option] = value

    return click.option(option, is_flag=True, expose_value=False, callback=remember, help=words)


_json = _remembered("--json", "Print JSON with a documented, numbered schema.")
_quiet = _remembered("--quiet", "Print nothing; the exit code is the answer.")


def selection(command: Command) -> Command:
    """Add --keys and --exclude."""
    return _keys(_exclude(command))


def output(command: Command) -> Command:
    """Add --json and --quiet, which no command is given: `answer`, `say` and `bar` heed them."""
    return _json(_quiet(command))


def wants_json() -> bool:
    """Tell whether --json was given."""
    return bool(click.get_current_context().meta["--json"])


def is_quiet() -> bool:
    """Tell whether --quiet was given."""
    return bool(click.get_current_context().meta["--quiet"])


class Parsed(click.ParamType):  # type: ignore[type-arg]  # click before 8.4 has no generic one
    """What a function makes of a text; it raises ValueError with what to write instead.

    Args:
        name: what it is, in capitals in the help.
        parse: the function.
    """

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _in_units(text: str, units: dict[str, float], between: str = "") -> float:
    """Return a number with a unit, and what matches `between` before it; infinity if it is none."""
    match = re.fullmatch(rf"(\d+(?:\.\d+)?){between}(\w*)", text)
    return float(match[1]) * units[match[2]] if match and match[2] in units else math.inf


def _seconds(text: str) -> float:
    seconds = _in_units(text, {"s": 1, "m": 60, "h": 3600, "d": 86400})
    if seconds == math.inf:
        raise ValueError(f"{text[:80]!r} is no length of time; write 90s, 30m, 2h or 1d")
    return seconds


def _nbytes(text: str) -> int:
    nbytes = _in_units(text.upper(), {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}, r"\s*")
    if not 1 <= nbytes < math.inf:
        raise ValueError(f"{text[:80]!r} is no size; write 5GB or 500MB")
    return int(nbytes)


def _tolerance(text: str) -> float:
    with suppress(ValueError):
        if 0 <= float(text) < math.inf:
            return float(text)
    raise ValueError(f"{text!r} is no tolerance; write a number such as 1e-6")


def _pair(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not old or not equals or not new:
        raise ValueError(f"{text!r} must be OLD=NEW")
    return old, new


def _version(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"v?(\d{1,4})\.(\d{1,4})([.+].*)?", text)
    if match is None:
        raise ValueError(f"{text[:80]!r} is no version; write 2.2 or 2.4.1")
    return int(match[1]), int(match[2])


DURATION = Parsed("duration", _seconds)
"""A length of time such as 90s, 30m, 2h or 1d; its value is in seconds."""
BYTE_SIZE = Parsed("size", _nbytes)
"""A number of bytes such as 5GB (5·10⁹) or 500MB."""
TOLERANCE = Parsed("tolerance", _tolerance)
"""A finite number of at least 0."""
PAIR = Parsed("pair", _pair)
"""OLD=NEW."""


_RENAMING = (
    click.option("--strip-prefix", default="", metavar="P", help="Take this off the front of names."),
    click.option("--add-prefix", default="", metavar="P", help="Put this in front of all names."),
    click.option("--rename", multiple=True, type=PAIR, metavar="OLD=NEW", help="Rename an entry. Repeatable."),
    click.option("--clean-names", is_flag=True, help="Take parts of wrappers (module, _orig_mod, …) out of names."),
    click.option(
        "--dtype",
        type=click.Choice(["float16", "bfloat16", "float32", "float64"]),
        help="Cast floating tensors to this.",
    ),
    click.option("--cast-optimizer", is_flag=True, help="With --dtype: cast the state of optimizers, too."),
    click.option(
        "--allow-overflow",
        is_flag=True,
        help="With --dtype: exit 0 though values became infinite, zero or subnormal.",
    ),
)


def renaming(command: Command) -> Command:
    """Add the options on new names and dtypes."""
    for option in reversed(_RENAMING):
        command = option(command)
    return command


def require_dtype(ctx: click.Context) -> None:
    """Refuse options on a cast where nothing is cast.

    Raises:
        click.UsageError: naming the first.
    """
    casts = [option for option in ("cast_optimizer", "allow_overflow") if ctx.params[option]]
    if casts and not ctx.params["dtype"]:
        option = f"--{casts[0].replace('_', '-')}"
        raise click.UsageError(f"{option} is about --dtype: leave it out, or name a dtype")


def _marker_name(ctx: click.Context, param: click.Parameter, value: str) -> str:
    from dcptool.ops.mark import name_problem

    problem = name_problem(value)
    if problem:
        raise click.BadParameter(problem, ctx, param)
    return value


marker = click.option(
    "--marker",
    default="_COMPLETE",
    show_default=True,
    metavar="NAME",
    callback=_marker_name,
    help="Name of the marker file.",
)
require_marker = click.option("--require-marker", is_flag=True, help="A checkpoint without a marker is not complete.")
require_parts = click.option(
    "--require",
    default="",
    metavar="PARTS",
    callback=lambda ctx, param, value: tuple(name for part in value.split(",") if (name := part.strip().strip("/"))),
    help="Parts a step must have, separated by commas, such as actor,critic,data/data.pt.",
)
finite = click.option(
    "--finite", is_flag=True, help="Read every byte, as --deep, and say which tensors hold NaN or infinity."
)
by = click.option(
    "--by",
    type=click.Choice(["number", "time"]),
    help="Order the steps of a run by their numbers, or by time, alone.  [default: as the markers of saves tell]",
)
also = click.option(
    "--also",
    multiple=True,
    metavar="DIR",
    type=PATH,
    help="A folder with further files of the same save, such as another node's disk. Repeatable.",
)
rank = click.option(
    "--rank",
    type=click.IntRange(0),
    metavar="R",
    help="Where ranks saved values of their own that differ: take those of this one.",
)
torch = click.option(
    "--torch",
    type=Parsed("version", _version),
    metavar="VERSION",
    help="Of DCP: refuse what this torch cannot hold.  [default: the oldest that can hold it all]",
)
threads = click.option(
    "--threads", type=click.IntRange(1), default=None, help="Reads at the same time.  [default: by processors]"
)
overwrite = click.option(
    "--overwrite", is_flag=True, help="Replace DST, once the new one is complete: one checkpoint, and nothing else."
)
check = click.option("--check", is_flag=True, help="Compare the output with the source before it gets its name.")

PIPED_WIDTH = 1000
"""Columns where there is no terminal: each entry stays on one line, for grep and awk."""


def width() -> int:
    """Return the columns of the terminal, or many where there is none."""
    import shutil

    return shutil.get_terminal_size((PIPED_WIDTH, 40)).columns


def print_json(document: dict[str, Any]) -> None:
    """Print a JSON document on stdout, unless --quiet."""
    import json

    if not is_quiet():
        click.echo(json.dumps(document, indent=2, allow_nan=False))


def say(text: str) -> None:
    """Print text on stdout, unless --quiet or --json."""
    if not is_quiet() and not wants_json():
        click.echo(text)


def noting() -> Callable[[str], None]:
    """Return a function that prints a note on stderr, unless --quiet, on whatever thread."""
    from dcptool.words import shown

    quiet = is_quiet()  # of this thread: others have no context

    def note(text: str) -> None:
        if not quiet:
            click.echo(f"note: {shown(text)}", err=True)

    return note


def answer(
    document: Callable[[], dict[str, Any]],
    text: Callable[[], str],
    notes: Iterable[str] = (),
    lines: Iterable[str] = (),
) -> None:
    """Print a result in the form that is asked for: JSON alone, or text; nothing if quiet.

    Args:
        document: makes the JSON.
        text: makes the text.
        notes: sentences that go to stderr beside the text.
        lines: what goes there before them, as it is.
    """
    from dcptool.words import shown

    if is_quiet():
        return
    if wants_json():
        print_json(document())
    else:
        for line in (*lines, *(f"note: {shown(note)}" for note in notes)):
            click.echo(line, err=True)
        click.echo(text())


def level_of(records: bool, deep: bool) -> Level:
    """Return how closely --records and --deep say to look."""
    from dcptool.checks.check import Level

    return Level.DEEP if deep else Level.RECORDS if records else Level.METADATA


def require_use_of_threads(threads: int | None, used: bool, option: str) -> None:
    """Refuse --threads where nothing would be read by them; `option` names what would.

    Raises:
        click.UsageError: it is given all the same.
    """
    if threads and not used:
        raise click.UsageError(f"--threads is for {option}; nothing else here reads more than a little")
