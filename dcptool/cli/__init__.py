"""The `dcptool` command: parses options, calls one function of the library, prints. Holds no logic of its own.

Exit codes: 0 good; 1 done, but the answer is bad; 2 wrong usage; 3 could not do it; 70 a bug; 130 Ctrl-C;
143 SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from typing import Any, NoReturn

import click

from dcptool import __version__
from dcptool.cli.convert import convert
from dcptool.cli.copy import copy
from dcptool.cli.diff import diff
from dcptool.cli.inspect import inspect
from dcptool.cli.interval import interval
from dcptool.cli.latest import latest
from dcptool.cli.mark import mark
from dcptool.cli.prune import prune
from dcptool.cli.report import report
from dcptool.cli.rescue import rescue
from dcptool.cli.reshard import reshard
from dcptool.cli.verify import verify
from dcptool.errors import DcptoolError, SeveralCheckpointsError, WorkerError
from dcptool.words import cut_lines

EXIT_FAILED = 3
EXIT_BUG = 70
MAX_COMMANDS = 20


class _CommandGroup(click.Group):
    """Turns whatever a command raises into the documented exit codes."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Tell somebody who gave a path and no command what they meant."""
        if args and args[0] not in self.commands and os.path.exists(args[0]):
            raise click.UsageError(f"a path needs a command before it; did you mean: dcptool inspect {args[0]}", ctx)
        return super().resolve_command(ctx, args)

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")  # a C locale must not turn names into tracebacks
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        kwargs["standalone_mode"] = False
        debug = "--debug" in sys.argv[1:]
        try:
            code = super().main(*args, **kwargs)
        except click.exceptions.Exit as done:
            code = done.exit_code
        except click.ClickException as error:
            error.show()
            code = error.exit_code
        except (click.Abort, KeyboardInterrupt):
            click.echo("interrupted", err=True)
            code = 128 + signal.SIGINT
        except DcptoolError as error:
            if debug:
                traceback.print_exc()
            if not error.told_elsewhere:
                _complain(_commands(error) if isinstance(error, SeveralCheckpointsError) else str(error))
            code = EXIT_BUG if isinstance(error, WorkerError) and error.trace else EXIT_FAILED
        except BrokenPipeError:
            # Whoever read our output has seen enough; do not complain when Python flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = 0
        except OSError as error:  # of our own output: what the library meets, it translates
            code = _complain(f"cannot write the output: {error.strerror or error}")
        except MemoryError:
            code = _complain("there is not enough memory for this")
        except Exception as error:
            if debug:
                traceback.print_exc()
            how = (
                "Report it with this traceback." if debug else "Run again with --debug for the traceback and report it."
            )
            code = _complain(f"this is a bug in dcptool: {type(error).__name__}: {error}\n{how}", EXIT_BUG)
        sys.exit(code if isinstance(code, int) else 0)


def _complain(message: str, code: int = EXIT_FAILED) -> int:
    """Print an error and return the exit code."""
    from dcptool.words import shown

    # Later lines are indented, so that a name with a newline in it cannot pass for a message of its own.
    lines = [line.strip() for line in f"error: {message}".splitlines()]
    click.echo("\n  ".join(map(shown, filter(None, lines))), err=True)
    return code


def _commands(error: SeveralCheckpointsError) -> str:
    """Return the command that was given once more for each checkpoint it can have meant."""
    import shlex

    from dcptool.checkpoint.steps import step_number

    given = sys.argv[1:]
    if error.path not in [argument.rstrip("/") for argument in given]:
        return str(error)
    commands = [
        shlex.join(["dcptool", *(part if argument.rstrip("/") == error.path else argument for argument in given)])
        for part in error.parts
    ]
    lines = [f"{error.path} holds {len(error.parts):,} checkpoints; name one:", *cut_lines(commands, MAX_COMMANDS)]
    if any(step_number(part.rpartition("/")[2]) is not None for part in error.parts):
        run = os.path.commonpath(error.parts) if "://" not in error.path else error.path
        lines.append(f"The newest complete step is what {shlex.join(['dcptool', 'latest', run])} prints.")
    if error.next_step:
        lines.append(error.next_step)
    return "\n".join(lines)


@click.group(cls=_CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dcptool")
@click.option("--debug", is_flag=True, help="Show a traceback when something fails.")
def main(debug: bool) -> None:
    """Inspect, verify, tidy, convert and compare torch.distributed.checkpoint (DCP) directories.

    Reads without torch and never executes a pickle.

    Exit codes: 0 good, 1 the answer is bad, 2 wrong usage, 3 could not do it, 70 a bug.
    """


for command in (inspect, verify, latest, mark, prune, convert, reshard, copy, rescue, diff, report, interval):
    main.add_command(command)
