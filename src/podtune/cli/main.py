"""The `podtune` command: a table of commands, and what becomes of their errors.

A command's module is imported only when that command is called, and imports nothing heavy before it runs (no
config.schema, numpy or jax): so every --help answers at once.
"""

import contextlib
import errno
import functools
import importlib
import io
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, NoReturn

import typer

from podtune import __version__
from podtune.cli.arguments import HintingCommand
from podtune.cli.signals import Terminated, heed_signals
from podtune.config.errors import ConfigError, Interrupted, PodtuneError

OUTSIDE_FAULTS = {
    errno.ENOSPC, errno.EACCES, errno.EPERM, errno.EROFS, errno.EDQUOT, errno.EMFILE, errno.ENFILE,
    errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EIO, errno.ESTALE, errno.ENODEV,
    errno.EFBIG, errno.EISDIR, errno.EEXIST,
}  # fmt: skip
"""What the operating system refuses for reasons that a traceback does not help with."""


class Command(NamedTuple):
    """One row of the table."""

    place: str
    """module:function"""
    help: str
    """One line, for the list of commands."""


COMMANDS: dict[str, Command] = {
    "init": Command("podtune.cli.init:init", "Look at the data and write a run file of four lines for it."),
    "check": Command("podtune.cli.check:check", "Check a run file and its data; say everything that is wrong."),
    "inspect": Command("podtune.cli.inspect:inspect", "Show rows as tokens, coloured by what is trained."),
    "prepare": Command("podtune.cli.prepare:prepare", "Tokenise and pack the data into TFRecord files."),
    "run": Command("podtune.cli.run:run", "Prepare, train, evaluate and export: the whole job."),
    "train": Command("podtune.cli.train:train", "Train only."),
    "eval": Command("podtune.cli.eval:evaluate", "Evaluate a finished run."),
    "export": Command("podtune.cli.export:export", "Export a finished run again."),
    "chat": Command("podtune.cli.chat:chat", "Talk to a model or to a finished run."),
    "schema": Command("podtune.cli.schema:schema", "Print the JSON Schema of a run file, for editors."),
    "doctor": Command("podtune.cli.doctor:doctor", "Say which devices, versions and credentials are found."),
}


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command and exits: 0, 2 for a fault in what was given, 3 for a failure, 130 when interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = next((argument for argument in given if not argument.startswith("-")), None)
    show_warnings()
    if arguments is None:
        leave_torch_out()
        heed_signals()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that the terminal's encoding lacks must not end the command
            stream.reconfigure(errors="backslashreplace")
    try:
        app = build_app(command)
        app(args=given, prog_name="podtune")
    except (KeyboardInterrupt, Terminated):  # before the command itself has begun, or behind it
        fail("interrupted", 130, label="")
    sys.exit(0)


class WarningLines(logging.Handler):
    """Shows what is logged as a line on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        typer.echo(f"{record.levelname.lower()}: {record.getMessage()}", err=True)


def leave_torch_out() -> None:
    """transformers, whose tokenizers are used here, imports torch wherever it is installed: seconds of every run and
    hundreds of megabytes, for what nothing here needs. So this process has no torch."""
    modules: dict[str, Any] = sys.modules  # None in it is Python's way to say that a module is not to be had
    modules.setdefault("torch", None)


def show_warnings() -> None:
    """What podtune logs as a warning or worse is seen, whatever handlers the libraries it uses install."""
    # Else the first line of every command is that transformers has found no PyTorch, which nothing here needs.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    logger = logging.getLogger("podtune")
    if not any(isinstance(handler, WarningLines) for handler in logger.handlers):
        logger.addHandler(WarningLines(logging.WARNING))


def build_app(called: str | None) -> typer.Typer:
    """The command line, with the called command as it is and the others by name and summary alone."""
    app = typer.Typer(
        help="Fine-tunes a model from four lines of YAML. Start with: podtune run FILE",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def options(  # pyright: ignore[reportUnusedFunction]
        version: Annotated[
            bool | None,
            typer.Option("--version", help="Print the version and leave.", is_eager=True, callback=say_version),
        ] = None,
    ) -> None:
        pass

    for name, command in COMMANDS.items():
        function = with_exit_statuses(load(command.place)) if name == called else summary
        app.command(name, cls=HintingCommand, short_help=command.help, help=None if name == called else command.help)(
            function
        )
    return app


def say_version(wanted: bool | None) -> None:
    """Prints the version and leaves, if it is wanted."""
    if wanted:
        typer.echo(f"podtune {__version__}")
        raise typer.Exit


def summary() -> None:
    """Stands in for a command that is not called."""


def load(place: str) -> Callable[..., Any]:
    """The function at module:function."""
    module, _, function = place.partition(":")
    return getattr(importlib.import_module(module), function)


def with_exit_statuses(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command, its errors turned into one message on stderr and an exit status."""

    @functools.wraps(command)
    def run(*positional: Any, **named: Any) -> None:
        try:
            command(*positional, **named)
            if sys.stdout is not None:  # None when it was closed before the start: `podtune schema >&-`
                sys.stdout.flush()
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except Interrupted as stopped:  # as was asked for
            fail(str(stopped), stopped.exit_status, label="")
        except ConfigError as error:
            typer.echo("\n".join(error.faults), err=True)
            fail(error.summary, error.exit_status)
        except PodtuneError as error:
            fail(str(error), error.exit_status)
        except (KeyboardInterrupt, Terminated):
            fail("interrupted", 130, label="")
        except BrokenPipeError:  # `podtune schema | head`: the reader has had enough
            if sys.stdout is not None:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)
        except OSError as error:
            if error.errno not in OUTSIDE_FAULTS:
                traceback.print_exc()
            fail(f"{error.strerror or error}: {error.filename or 'standard output, or a file with no name'}", 3)
        except Exception as error:
            traceback.print_exc()
            fail(f"unexpected {type(error).__name__}: {error} (a fault of podtune: please report it with the above)", 3)

    return run


def fail(message: str, status: int, label: str = "error: ") -> NoReturn:
    """Prints the message and exits."""
    with contextlib.suppress(OSError, AttributeError):  # a full or closed stdout must not hide the message
        sys.stdout.flush()
    typer.echo(f"{label}{message}", err=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
