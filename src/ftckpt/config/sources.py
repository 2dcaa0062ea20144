"""Settings put together from arguments, environment and file. It opens nothing else.

Precedence: explicit argument > environment (``FTCKPT_*``) > file (``ftckpt.toml``, or ``FTCKPT_CONFIG``) > default.
Every value knows where it came from, and all that is wrong is said at once.
"""

from __future__ import annotations

import os
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from ftckpt.config.launcher import VARIABLES
from ftckpt.config.settings import FILE, PREFIX, Settings, env_name, setting_keys
from ftckpt.domain.deadlines import Deadlines
from ftckpt.domain.keep import Keep, parse_keep
from ftckpt.errors import ConfigError


def load(arguments: Mapping[str, Any] | None = None, *, file: str | Path | None = None, env: Mapping[str, str] | None = None) -> Settings:
    """Read the settings of this process, now.

    Args:
        arguments: explicit values by key (deadlines as ``"deadlines.log_s"``, or a ``Deadlines`` as ``"deadlines"``). None
            counts as not given, but for ``keep``, where it keeps all.
        file: TOML file; left out: ``FTCKPT_CONFIG``, else ``ftckpt.toml`` in the working directory if there is one.
        env: environment; left out: this process's.

    Raises:
        ConfigError: there are unknown keys or values of a wrong type; lists all of them at once, and what ``problems`` finds in the rest.
    """
    env = os.environ if env is None else env
    wrong: list[str] = []
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    hints = {**get_type_hints(Settings), **{f"deadlines.{k}": t for k, t in get_type_hints(Deadlines).items()}}
    for where, key, raw, label in (*_from_file(file, env), *_from_env(env), *_from_arguments(arguments or {})):
        if key not in hints or key in ("origin", "deadlines"):
            wrong.append(f"{label}: there is no such setting")
            continue
        try:
            value = _keep(raw) if key == "keep" else raw
            values[key] = msgspec.convert(value, hints[key], strict=where != "environment" or key == "keep")
        except (msgspec.ValidationError, ConfigError) as e:
            choices = f"; use one of {', '.join(get_args(hints[key]))}" if get_origin(hints[key]) is Literal else ""
            wrong.append(f"{label}: {e.what + ': ' + e.todo if isinstance(e, ConfigError) else e}{choices}")
            continue
        origin[key] = label
    _fill_defaults(values, origin, env)
    deadlines = Deadlines(**{k.partition(".")[2]: v for k, v in values.items() if "." in k})
    made = Settings(**{k: v for k, v in values.items() if "." not in k}, deadlines=deadlines, origin=origin)
    if wrong:  # and what is wrong with the rest, so that one look is enough
        raise ConfigError(
            "these settings cannot be read:\n  " + "\n  ".join((*wrong, *made.problems())),
            now="nothing was started",
            todo="correct them all; settings are listed in docs/config.md",
        )
    return made


def _keep(raw: Any) -> Any:
    """A retention policy as a setting: None, a number, or its short text.

    Raises:
        ConfigError: the text cannot be read.
    """
    text = str(raw) if isinstance(raw, Keep) else raw
    if not isinstance(text, str):
        return text
    if text in ("all", "none", "None"):
        return None
    if text.lstrip("-").isdigit():
        return int(text)
    return str(parse_keep(text))


_Item = tuple[str, str, Any, str]  # kind of source, key, value, label for messages


def _from_file(file: str | Path | None, env: Mapping[str, str]) -> Iterator[_Item]:
    named = file or env.get(env_name("config"))
    path = Path(named or FILE)
    if not named and not path.is_file():
        return
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise ConfigError(f"settings file {path} cannot be read: {e}", now="nothing was started", todo="correct it, or leave it out") from e
    for key, value in data.items():
        if isinstance(value, dict):
            yield from (("file", f"{key}.{k}", v, f"file {path}: {key}.{k}") for k, v in value.items())
        else:
            yield "file", key, value, f"file {path}: {key}"


def _from_env(env: Mapping[str, str]) -> Iterator[_Item]:
    for key in setting_keys():
        name = env_name(key)
        if name in env and (env[name] or key in ("agent_host", "job")):
            yield "environment", key, env[name], f"environment {name}"


def _from_arguments(arguments: Mapping[str, Any]) -> Iterator[_Item]:
    for key, value in arguments.items():
        if key == "deadlines" and isinstance(value, Deadlines):
            yield from (("argument", f"deadlines.{k}", v, f"argument deadlines.{k}") for k, v in msgspec.structs.asdict(value).items())
        elif value is not None or key == "keep":
            yield "argument", key, os.fspath(value) if isinstance(value, os.PathLike) else value, f"argument {key}"


def _fill_defaults(values: dict[str, Any], origin: dict[str, str], env: Mapping[str, str]) -> None:
    """Defaults that depend on this process: evaluated here, at the call."""
    if "replica" not in values and env.get("REPLICA_GROUP_ID"):
        group = env["REPLICA_GROUP_ID"]
        values["replica"] = f"replica-{group}" if group.isdigit() else group
        origin["replica"] = "environment REPLICA_GROUP_ID"
    if not values.get("runtime_dir"):
        base = env.get("XDG_RUNTIME_DIR")
        usable = bool(base) and os.access(base or "", os.W_OK)
        values["runtime_dir"] = (
            os.path.join(base, "ftckpt") if base and usable else os.path.join(tempfile.gettempdir(), f"ftckpt-{os.getuid()}")
        )


def reading(
    job: str | None,
    root: str | os.PathLike[str] | None,
    log: str | None,
    *,
    file: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    log_s: float | None = None,
) -> Settings:
    """Settings of who only reads a job. A root that is named is looked at as it is: its own marker says whether there is a durable
    tier behind it, not what environment or file say of another root. Raises as :func:`load`.
    """
    return load(
        {"job": job, "root": root, "log": log, "deadlines.log_s": log_s, **({} if root is None else {"durable": ""})}, file=file, env=env
    )


def unknown_variables(env: Mapping[str, str] | None = None) -> list[str]:
    """Variables that begin as ours and mean nothing: mistyped, or of something else. They are not refused, since others may set such names."""
    known = {*map(env_name, setting_keys()), *VARIABLES.values(), env_name("config")}
    return sorted(name for name in (os.environ if env is None else env) if name.startswith(PREFIX) and name not in known)
