"""A recipe from its YAML file, with overrides, for every command alike.

Bad input raises `ConfigError` with one line: file, key, value, what would be valid.
"""

from __future__ import annotations

import argparse
import difflib
import re
from pathlib import Path
from typing import get_args

import yaml
from pydantic import ValidationError

from configs.command import PlainError
from configs.schema import Config


class ConfigError(PlainError, ValueError):
    """A configuration that cannot be used; the message is one line."""


def load(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Read `path` and apply overrides such as `train.lr=2e-4` (values are YAML).

    Raises ConfigError: no such file, not YAML, unknown key, impossible value.
    """
    try:
        tree = yaml.load(Path(path).read_text(), Loader=_Loader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a recipe is a mapping of sections, got {type(tree).__name__}")
    for override in overrides:
        _apply(tree, override)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{path}: " + "; ".join(_explain(item) for item in error.errors())) from None


def parse(parser: argparse.ArgumentParser, argv: list[str] | None = None) -> tuple[argparse.Namespace, Config]:
    """Parse a command line of a command's own options and what all commands share, CONFIG and overrides; a bad recipe ends the
    command with one line and status 2."""
    parser.add_argument("config", metavar="CONFIG", help="recipe, e.g. configs/smollm2_embedded.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides, e.g. train.lr=2e-4")
    args = parser.parse_intermixed_args(argv)
    try:
        return args, load(args.config, args.overrides)
    except ConfigError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


class _Loader(yaml.SafeLoader):
    """YAML 1.2 floats: `2e-4` is a number, as everybody expects; and a key that is there twice is a mistake."""

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value]
        if twice := [key.value for key, _ in node.value if keys.count(key.value) > 1]:
            raise yaml.constructor.ConstructorError(None, None, f"{twice[0]} is there twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789."))


def _apply(tree: dict, override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"override {override!r}: expected key=value, e.g. train.lr=2e-4")
    *parents, leaf = key.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"override {override!r}: {parent} is not a section")
    try:
        tree[leaf] = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: {text} is not YAML ({' '.join(str(error).split())})") from None


def _explain(item: dict) -> str:
    """One clause for one of pydantic's errors."""
    key = ".".join(str(part) for part in item["loc"] if part != "[key]")
    if item["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(item["loc"][-1]), _keys(item["loc"][:-1]), 1)
        return f"unknown key {key}" + (f" (did you mean {near[0]}?)" if near else f" (valid: {', '.join(_keys(item['loc'][:-1]))})")
    if item["type"] == "missing":
        return f"{key} is missing"
    message = item["msg"].removeprefix("Value error, ")
    if not key or (item["type"] == "value_error" and isinstance(item["input"], dict)):  # of a whole section: the message names the keys
        return message
    return f"{key} = {item['input']!r}: {message[0].lower()}{message[1:]}"


def _keys(location: tuple) -> list[str]:
    section = Config
    for part in location:
        annotation = section.model_fields[part].annotation
        section = next(kind for kind in (annotation, *get_args(annotation)) if hasattr(kind, "model_fields"))
    return sorted(section.model_fields)
