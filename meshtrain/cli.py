"""Gives all commands one parser, one way to end, and the exit codes.

Wrong usage is one sentence, as a wrong config is.
"""

import argparse
import contextlib
import errno
import functools
import io
import itertools
import logging
import math
import os
import re
import select
import shlex
import stat
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from meshtrain.config.key import LARGEST, keys, meant
from meshtrain.config.places import CONFIGS
from meshtrain.config.schema import Config
from meshtrain.errors import ConfigError, Unreadable, nearest, refusal, say, short
from meshtrain.files import write_atomically
from meshtrain.registry import TRUST
from meshtrain.run import early

DONE = 0
FAILED = 1
USAGE = 2
STOPPED = early.STOPPED


def command(main: Callable[[Sequence[str] | None], int]) -> Callable[..., int]:
    """Makes a command's `main` end on a sentence and an exit code whatever the user, the system or the reader of its
    output does.
    """

    @functools.wraps(main)
    def ended(arguments: Sequence[str] | None = None) -> int:
        # A file's name may hold what the terminal's encoding does not.
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="backslashreplace")
        early.interrupt()
        at_once = False
        try:
            code = _code_of(lambda: main(arguments))
            early.leave()
        except KeyboardInterrupt as request:
            early.leave()
            say(request if request.args else "stopped.")
            code = STOPPED
            # At its end the interpreter would wait for what XLA compiles, and crash on it.
            at_once = arguments is None
        code = code if _output_is_written() else FAILED
        if at_once:
            os._exit(code)
        return code

    return ended


def _code_of(work: Callable[[], int]) -> int:
    """Returns the exit code of a command's work; prints the sentence of an error that input or the system caused."""
    try:
        with _log_printed(), _umask(), _trust():
            return work()
    except ConfigError as error:
        say(error)
        return USAGE
    except Unreadable as error:
        say(error)
        return FAILED
    except OSError as error:
        _report(error)
        # such a name is bad input, wherever it is met
        if error.errno == errno.ENAMETOOLONG:
            return USAGE
        return FAILED


@contextlib.contextmanager
def _log_printed() -> Iterator[None]:
    """Prints what the package logs while a command runs; who imports the package decides of its log as of any
    other's.
    """
    log = logging.getLogger(__package__)
    handler = logging.Handler()
    handler.emit = lambda record: say(record.getMessage())  # type: ignore[method-assign]
    level = log.level
    propagate = log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False  # a library's handler on the root would print it again
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate


@contextlib.contextmanager
def _umask() -> Iterator[None]:
    """Keeps others from writing to what a command makes: they could have it run, as pickled arrays and decisions."""
    before = os.umask(stat.S_IWOTH)
    os.umask(before | stat.S_IWOTH)
    try:
        yield
    finally:
        os.umask(before)


@contextlib.contextmanager
def _trust() -> Iterator[None]:
    """Keeps what --trust names to one command, where a process calls several."""
    before = os.environ.get(TRUST)
    try:
        yield
    finally:
        os.environ.pop(TRUST, None)
        if before is not None:
            os.environ[TRUST] = before


def _output_is_written() -> bool:
    """Hands on what is left of the output; if that is refused it goes nowhere, or the interpreter would try once more
    at its end.
    """
    if sys.stdout is None:
        return True  # the process was started without one
    try:
        sys.stdout.flush()
        return True
    except OSError as error:
        _report(error)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False


def _report(error: OSError) -> None:
    """Says what the system has refused; what has no file name and was written is the output, whose reader may have had
    enough.
    """
    if isinstance(error, BrokenPipeError) and _reader_is_gone():
        return
    if error.filename:
        where = short(error.filename)
    elif error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EPIPE):
        where = "standard output cannot be written"
    else:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"the system refused a call ({Path(place.filename).name}, line {place.lineno})"
    say(f"{where}: {refusal(error)}.")


def _reader_is_gone() -> bool:
    try:
        number = sys.stdout.fileno()
    except (AttributeError, io.UnsupportedOperation):
        return False
    poll = select.poll()
    poll.register(number, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


# The words typed before the name of a command, where that was not Python with -m and the command's own module.
typed = ""
_MODULE = re.compile("^python -m meshtrain[. ]")


class Help(argparse.HelpFormatter):
    """Says the default of each option that has one, in one way."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        stated = not action.help or "(default: " in action.help
        if (
            stated
            or action.default in (None, False, argparse.SUPPRESS)
            or action.default == []
        ):
            return action.help
        return f"{action.help} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """argparse that takes no abbreviations, and says what is wrong in one sentence with the nearest right spelling."""

    def __init__(self, **settings: Any) -> None:
        usual: dict[str, Any] = {"allow_abbrev": False, "formatter_class": Help}
        super().__init__(**usual | settings)
        if typed:
            self.prog = _MODULE.sub(f"{typed} ", self.prog)
            self.description = _MODULE.sub(f"{typed} ", self.description or "")

    # Parsers of commands that stand in the place of options, as those of `survive` do.
    beside: Mapping[str, Callable[[], "Parser"]] = {}

    @property
    def commands(self) -> Mapping[str, "Parser"]:
        """The parsers of its commands, if it has any."""
        choices = (
            a.choices
            for a in self._actions
            if isinstance(a, argparse._SubParsersAction)
        )
        return next(choices, None) or {
            name: of_command() for name, of_command in self.beside.items()
        }

    def add_config(self, required: bool = True) -> None:
        """Adds --config and --set, as every command that needs a run's config takes them."""
        meaning = "the YAML file of the run, or a config that ships with meshtrain, such as quickstart"
        self.add_argument(
            "--config", required=required, metavar="FILE|NAME", help=meaning
        )
        meaning = "overrides one key, as in mesh.data=2; may be repeated"
        self.add_argument(
            "--set", action="append", default=[], metavar="KEY.PATH=VALUE", help=meaning
        )
        self.add_trust()

    def add_trust(self) -> None:
        """Adds --trust, as every command takes it that may meet the code of a run."""
        meaning = (
            "imports the code that run.imports of this run names, even if others own it"
        )
        self.add_argument(
            "--trust",
            action="append",
            default=[],
            type=_folder,
            metavar="RUN",
            help=meaning,
        )

    def add_model(self, drafts: bool = False) -> None:
        """Adds a model that is to be used, as every command that opens one takes it (`generate.opened.open_asked`);
        `drafts`: its own may be asked for.
        """
        add = self.add_argument
        add(
            "path",
            type=Path,
            metavar="RUN",
            help="a run directory, a checkpoint, or a Hugging Face directory",
        )
        add(
            "--mesh",
            metavar="data=A,tensor=B",
            help="the mesh over which the model is spread (default: the fewest devices that hold it)",
        )
        meaning = (
            "the dtype to compute in: float32, bfloat16, float16 (default: the model's)"
        )
        add("--precision", metavar="DTYPE", help=meaning)
        add(
            "--weights",
            choices=("float8", "int8"),
            help="holds the layers' matmul weights in 8 bits",
        )
        if drafts:
            meaning = "lets the model's model.mtp layer guess tokens ahead: the same text in fewer steps"
            add("--draft", action="store_true", help=meaning)
        add(
            "--step",
            type=step,
            default="newest",
            help="the run's checkpoint: a number, best (by eval loss) or newest",
        )
        add(
            "--adapter",
            type=Path,
            metavar="PEFT_DIR",
            help="PEFT adapters for a Hugging Face directory",
        )
        self.add_trust()

    def parse_known_args(
        self, args: Any = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        self._check(words[: words.index("--")] if "--" in words else words)
        if "--config" in self._option_string_actions and not any(
            word.partition("=")[0] == "--config" for word in words
        ):
            self._refuse_bare_config(words)
        parsed, beyond = super().parse_known_args(words, namespace)
        if beyond:
            before = ["", *words][words.index(beyond[0])]
            ending = self._setting(
                *((before, beyond[0]) if before in keys(Config) else beyond[:1])
            )
            if not ending and "--prompt" in self._option_string_actions:
                ending = f"; did you mean --prompt {shlex.quote(short(beyond[0]))}?"
            self.error(f"unexpected argument {short(beyond[0])}{ending}")
        if folders := getattr(parsed, "trust", None):
            already = os.environ.get(TRUST, "").split(os.pathsep)
            os.environ[TRUST] = os.pathsep.join(
                filter(None, dict.fromkeys([*already, *folders]))
            )
        return parsed, beyond

    def _refuse_bare_config(self, words: Sequence[str]) -> None:
        """Refuses a config that is given without --config, with the right spelling."""
        takes_words = any(not action.option_strings for action in self._actions)
        for before, word in itertools.pairwise(["", *words]):
            option = self._option_string_actions.get(before)
            is_value = option is not None and option.nargs != 0
            if (
                not is_value
                and is_config(word)
                and (word.endswith((".yaml", ".yml")) or not takes_words)
            ):
                self.error(
                    f"unexpected argument {short(word)}; did you mean --config {short(word)}?"
                )

    def _setting(self, word: str, value: str = "", *_: str) -> str:
        """Returns the end of a sentence on a key of the config that was given without --set; nothing if the word is
        near none.
        """
        name, equals, given = word.lstrip("-").replace("-", "_").partition("=")
        if equals:
            value = given
        elif value.startswith("-") or not value:
            value = "VALUE"
        paths = keys(Config) if "--set" in self._option_string_actions else {}
        if paths and (path := meant(name)) and name not in paths:
            return f"; did you mean --set {path}={short(value)}?"
        if "." not in name:
            paths = {
                path: key for path, key in paths.items() if path.endswith(f".{name}")
            }
            # Several sections may have it
            name = next(iter(paths)) if len(paths) == 1 else ""
        return nearest(name, paths, lambda path: f"--set {path}={short(value)}")

    def _check(self, words: Sequence[str]) -> None:
        """Refuses what argparse has no sentence for: unknown options and commands, by their nearest, and empty
        words.
        """
        options = [name for action in self._actions for name in action.option_strings]
        commands = next(
            (
                a.choices
                for a in self._actions
                if isinstance(a, argparse._SubParsersAction)
            ),
            None,
        )
        for i, word in enumerate(words):
            name = word.partition("=")[0]
            if not word or (name in options and word == f"{name}="):
                self.error(
                    f"an argument is empty; give {name or 'it'} a value, or leave it out"
                )
            if (
                name.startswith("-")
                and name not in options
                and not re.fullmatch(r"-|-[0-9.]+", word)
            ):
                near = nearest(
                    name.lstrip("-"),
                    [option.lstrip("-") for option in options if option[:2] == "--"],
                    "--{}".format,
                )
                self.error(
                    f"there is no option {name}{self._setting(*words[i:]) or near or '.'}"
                )
            if commands is not None and not name.startswith("-"):
                if word not in commands:
                    ending = (
                        nearest(word, commands) or f"; legal are {', '.join(commands)}."
                    )
                    self.error(f"there is no command {word}{ending}")
                return  # what follows are the command's own words, which it checks
        if commands is not None and not {"-h", "--help"} & set(words):
            self.error(f"a command is missing; legal are {', '.join(commands)}.")

    def error(self, message: str) -> NoReturn:
        ending = "" if message.endswith((".", "?")) else f"; see {self.prog} --help."
        say(f"{short(message)}{ending}")
        self.exit(USAGE)


def train_parser() -> Parser:
    """Returns the parser of `meshtrain.train`, which imports JAX and needs it earlier."""
    parser = Parser(
        prog="python -m meshtrain.train",
        description="Trains a transformer on a device mesh.",
    )
    parser.add_config()
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print the whole resolved config as YAML and exit",
    )
    return parser


def whole_number(text: str) -> int:
    """Returns an option's value of at least 1."""
    if not re.fullmatch("[0-9]{1,10}", text) or not 1 <= int(text) <= LARGEST[int]:
        legal = f"a whole number of at least 1 and at most {LARGEST[int]}"
        raise argparse.ArgumentTypeError(f"{short(repr(text))} is not {legal}")
    return int(text)


def number_from(
    least: float, most: float = math.inf, kind: type[float] = float
) -> Callable[[str], float]:
    """Returns the type of an option that is a number, of a kind, from `least` to `most`."""

    def number(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most or value == math.inf:
            what = "a whole number" if kind is int else "a number"
            if most < math.inf:
                legal = f"from {least:g} to {most:g}"
            else:
                legal = f"of at least {least:g}"
            raise argparse.ArgumentTypeError(
                f"{short(repr(text))} is not {what} {legal}"
            )
        return value

    return number


def step(text: str) -> int | Literal["newest", "best"]:
    """Returns an option's value that names a checkpoint of a run."""
    if text == "newest" or text == "best":
        return text  # type: ignore[return-value]
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(
            f"{short(repr(text))} is not a step; it must be a number, best or newest"
        )
    return int(text)


def is_config(word: str) -> bool:
    """Returns whether a word names a config that --config takes."""
    return (
        not word.startswith("-")
        and "=" not in word
        and (word.endswith((".yaml", ".yml")) or (CONFIGS / f"{word}.yaml").is_file())
    )


def _folder(text: str) -> str:
    """Returns the value of --trust, as the environment takes it."""
    path = os.path.abspath(text)
    if not text or os.pathsep in path or not os.path.isdir(path):
        raise argparse.ArgumentTypeError(
            f"{short(repr(text))} is not a directory; give the run whose code may run"
        )
    return path


def check_target(path: str) -> None:
    """Refuses at once what else would be found to be no place for a file when all is done."""
    with _refused(path):
        try:
            directory = stat.S_ISDIR(os.stat(path).st_mode)
            reachable = True
        except FileNotFoundError:
            directory = False
            reachable = Path(path).resolve().parent.is_dir()
        if directory:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not reachable:
        parent = Path(path).resolve().parent
        raise ConfigError(
            f"{short(path)} cannot be written: there is no directory {short(parent)}."
        )


def write_target(path: str, text: str) -> None:
    """Writes a file that a user has named, and says so; ConfigError if the system refuses."""
    target = Path(path)
    with _refused(path):
        if target.exists() and not target.is_file():
            # as /dev/stdout, whose place no file may take
            target.write_text(text, encoding="utf-8")
        else:
            write_atomically(target.resolve(), text.encode())
    say(f"wrote {path}")


@contextlib.contextmanager
def _refused(path: str) -> Iterator[None]:
    """Raises ConfigError for what the system refuses of a file."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{short(path)} cannot be written: {refusal(error)}."
        ) from None
    except ValueError:  # a NUL, or half a surrogate pair
        raise ConfigError(
            f"{short(path)} is not a path that a file can have."
        ) from None
