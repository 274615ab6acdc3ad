"""One settings table, many faces: a frozen dataclass whose fields are flags, variables and YAML keys at once.

Knows how a field declared with `flag(...)` is read from an argument list, `QUIRE_*` variables or a YAML file, and in
which order these win. Knows no particular setting: the table itself is `server.config.ServerConfig`.
"""

import argparse
import dataclasses
import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml

ENV_PREFIX = "QUIRE_"
Parse = Callable[[str], Any]
Settings = TypeVar("Settings")

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}
OTHER_VARIABLES = frozenset(
    {"QUIRE_CONFIG", "QUIRE_CACHE_DIR", "QUIRE_DEFAULT_MODEL", "QUIRE_NATIVE", "QUIRE_NATIVE_FLAGS"}
)
"""Variables that are no settings: the settings' file, and those that the engine reads itself."""

# Kubernetes describes a Service called "quire" to its pods with variables of these shapes; they are no settings.
_SERVICE_LINK = re.compile(r"QUIRE_(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP)(_\w+)?)")


class ConfigError(ValueError):
    """A setting that cannot be used; the message is one line that names the setting and where it came from."""


@dataclasses.dataclass(frozen=True, slots=True)
class FlagSpec:
    """How one setting is written and read.

    Attributes:
        parse: one text -> value; raises ValueError saying what was expected.
        repeat: the flag may be given several times; a tuple of values (in a variable: separated by commas).
        switch: a boolean with a `--no-...` form.
        positional: given without a name on the command line.
    """

    help: str
    parse: Parse = str
    metavar: str = "TEXT"
    repeat: bool = False
    switch: bool = False
    positional: bool = False


def flag(default: Any, help: str, parse: Parse = str, **options: Any) -> Any:
    """A dataclass field that is also a flag; `options` are the other attributes of `FlagSpec`, and `secret`."""
    secret = options.pop("secret", False)
    spec = FlagSpec(help, parse, **options)
    return dataclasses.field(default=default, repr=not secret, metadata={"flag": spec})


def flags_of(table: type) -> dict[str, FlagSpec]:
    """Setting name -> its description, in declaration order."""
    return {field.name: field.metadata["flag"] for field in dataclasses.fields(table)}


def flag_name(setting: str) -> str:
    """`max_num_seqs` -> `--max-num-seqs`."""
    return "--" + setting.replace("_", "-")


# ---------------------------------------------------------------------------------------------- parsing single values


def size(text: str) -> int:
    """Bytes of "2GiB", "32MB", "512 k" or a plain number (K, M, G, T are powers of 1000; Ki, Mi, ... of 1024)."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("a number of bytes such as 2GiB, 32MB or 1048576")
    number, unit, binary = match.groups()
    if binary and not unit:
        raise ValueError("a number of bytes such as 2GiB, 32MB or 1048576")
    return int(Fraction(number) * (1024 if binary else 1000) ** " kmgt".index(unit.lower() or " "))


def some_bytes(text: str) -> int:
    """The same, and at least one."""
    value = size(text)
    if value == 0:
        raise ValueError("a number of bytes above 0, such as 2GiB")
    return value


def integer(low: int, high: int | None = None) -> Parse:
    """A parser of whole numbers within `low..high`."""
    expected = f"a whole number {f'from {low} to {high}' if high is not None else f'of at least {low}'}"

    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d+", text) or int(text) < low or (high is not None and int(text) > high):
            raise ValueError(expected)
        return int(text)

    return parse


def number(low: float, high: float | None = None, *, above: bool = False) -> Parse:
    """A parser of finite numbers within `low..high`; `above` excludes `low` itself."""
    bounds = f"{'above' if above else 'of at least'} {low:g}" + (f" and at most {high:g}" if high is not None else "")

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"a number {bounds}") from None
        too_low = value <= low if above else value < low
        if too_low or not value < float("inf") or (high is not None and value > high):
            raise ValueError(f"a number {bounds}")
        return value

    return parse


def choice(*names: str, **aliases: str) -> Parse:
    """A parser of one of `names`; `aliases` are other spellings of them."""

    def parse(text: str) -> str:
        value = aliases.get(text, text)
        if value not in names:
            raise ValueError(f"one of {', '.join(names)}")
        return value

    return parse


def nonempty(text: str) -> str:
    """Any text but the empty one."""
    if not text:
        raise ValueError("a text that is not empty")
    return text


def boolean(text: str) -> bool:
    """Yes or no, as people write it in variables and YAML."""
    word = text.strip().lower()
    if word not in _TRUE | _FALSE:
        raise ValueError("true or false")
    return word in _TRUE


# ------------------------------------------------------------------------------------------------------ three sources


class _OneLineParser(argparse.ArgumentParser):
    """An argument parser that says what is wrong in one line and exits with status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def build_parser(table: type, prog: str, description: str) -> argparse.ArgumentParser:
    """An argument parser for every setting of `table`, and `--config`."""
    parser = _OneLineParser(prog=prog, description=description, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of these settings (env QUIRE_CONFIG)")
    for name, spec in flags_of(table).items():
        common: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": spec.help.replace("%", "%%")}
        if spec.positional:
            parser.add_argument(name, nargs="?", metavar=spec.metavar, default=argparse.SUPPRESS, help=common["help"])
        elif spec.switch:
            parser.add_argument(flag_name(name), action=argparse.BooleanOptionalAction, **common)
        else:
            action = "append" if spec.repeat else "store"
            parser.add_argument(flag_name(name), action=action, metavar=spec.metavar, **common)
    return parser


def read_settings(
    table: type[Settings], parser: argparse.ArgumentParser, argv: Sequence[str], environ: Mapping[str, str]
) -> Settings:
    """Build `table` from flags, then variables, then the YAML file, then defaults.

    Raises:
        ConfigError: one line that says which setting, from where, and what was expected.
        SystemExit: for `--help`, and for unknown flags (status 2).
    """
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(_unknown_argument(unknown[0], table))
    flags = vars(given)
    config_file = flags.pop("config", None) or environ.get(f"{ENV_PREFIX}CONFIG")
    values: dict[str, Any] = {}
    if config_file:
        values.update(_from_yaml(table, Path(config_file)))
    values.update(_from_environ(table, environ))
    values.update({name: _convert(table, name, raw, flag_name(name)) for name, raw in flags.items()})
    return table(**values)


def _unknown_argument(argument: str, table: type) -> str:
    if not argument.startswith("-"):
        return f"unexpected argument {argument!r}"
    name = argument.split("=", 1)[0]
    known = [flag_name(setting) for setting, spec in flags_of(table).items() if not spec.positional]
    return f"unknown flag {name}{_suggestion(name, known)}"


def _suggestion(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _from_environ(table: type, environ: Mapping[str, str]) -> dict[str, Any]:
    known = {ENV_PREFIX + name.upper(): name for name in flags_of(table)}
    values = {}
    for variable, raw in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable in OTHER_VARIABLES or _is_service_link(variable, raw):
            continue
        if variable not in known:
            raise ConfigError(f"unknown environment variable {variable}{_suggestion(variable, known)}")
        values[known[variable]] = _convert(table, known[variable], raw, variable)
    return values


def _is_service_link(variable: str, raw: str) -> bool:
    return bool(_SERVICE_LINK.fullmatch(variable)) or (variable == "QUIRE_PORT" and "://" in raw)


def _from_yaml(table: type, path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config file {path}: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"the config file {path} is not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"the config file {path} must hold settings by name, not a {type(content).__name__}")
    return _from_mapping(table, content, f" in {path}")


def settings_from(table: type[Settings], values: Mapping[str, object]) -> Settings:
    """Build `table` from values by name, as Python code gives them; None is the default.

    Raises:
        ConfigError: as `read_settings`.
    """
    return table(**_from_mapping(table, values, ""))


def _from_mapping(table: type, content: Mapping[Any, object], where: str) -> dict[str, Any]:
    known = {name.replace("_", "-") for name in flags_of(table)}
    values = {}
    for key, raw in content.items():
        name = str(key).replace("_", "-")
        if name not in known:
            raise ConfigError(f"unknown setting {key!r}{where}{_suggestion(name, known)}")
        if raw is not None:
            setting = name.replace("-", "_")
            values[setting] = _convert(table, setting, raw, f"{key}{where}")
    return values


def _convert(table: type, name: str, raw: object, origin: str) -> Any:
    """One raw value (text, or what YAML gave) through the setting's own parser."""
    spec = flags_of(table)[name]
    try:
        if spec.repeat:
            items = (
                raw if isinstance(raw, list | tuple) else [part.strip() for part in str(raw).split(",") if part.strip()]
            )
            return tuple(spec.parse(str(item)) for item in items)
        parse = boolean if spec.switch else spec.parse
        return parse(",".join(map(str, raw)) if isinstance(raw, list | tuple) else str(raw))
    except ValueError as error:
        shown = "the value given" if "key" in name else repr(raw)
        raise ConfigError(f"{origin}: expected {error}, got {shown}") from error


def environment() -> Mapping[str, str]:
    """The process's variables (a function, so that tests pass their own)."""
    return os.environ
