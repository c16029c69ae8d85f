"""Parse ``--config_overrides "hidden_size=64,layer_types=[a,b]"`` and ``--peft_config`` into typed fields."""

import ast
import dataclasses
import json
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from peft import IA3Config, LoraConfig
from transformers import PreTrainedConfig

from hf_hybrid.suggestions import did_you_mean

_CLOSING = {"[": "]", "{": "}", "(": ")"}
_DEEPEST = 20  # brackets inside brackets; no field needs more
_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_CONTAINERS = {list, tuple, dict}
_KINDS = {bool, int, float, str, types.NoneType, *_CONTAINERS}
_SHOWN = 200  # characters of a text that an error shows
_NOT_GIVEN = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version", "revision",
    "runtime_config", "task_type", "use_dora",
}  # fmt: skip
"""Fields of an adapter's configuration that other flags or peft set."""


def parse_config_overrides(text: str, config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """Parse overrides by the types of a configuration's fields.

    Args:
        text: ``name=value`` pairs separated by commas, or a JSON object. A comma inside quotes or brackets separates
            nothing. A list is written ``[1,2]`` or ``[a,b]``; its items are parsed like other values. ``none`` means
            None for a field that takes it, unless ``none`` is a value of the field itself.
        config_class: The configuration class; its names for a field (``hidden_size`` of T5) are accepted too.

    Returns:
        The values by field name; if the class has a ``from_preset``, also the name of a preset under ``preset``.

    Raises:
        ValueError: A pair is not ``name=value``, a field is unknown or given twice, or a value is not of its type.
    """
    known = _field_types(config_class)
    if hasattr(config_class, "from_preset"):
        known["preset"] = str
    aliases: dict[str, str] = dict(config_class.attribute_map)
    own = sorted({*known, *aliases} - set(vars(PreTrainedConfig())))

    def is_word(name: str, raw: str) -> bool:
        return _takes_none_as_word(config_class, name, raw, known[name])

    return _parse_fields("config_overrides", text, config_class.__name__, known, own, aliases, is_word)


def parse_peft_config(text: str, method: str) -> dict[str, Any]:
    """Parse ``--peft_config`` by the types of peft's fields.

    Raises:
        ValueError: A field is unknown or given twice, or a value is not of its type.
    """
    config_class: Any = IA3Config if method == "ia3" else LoraConfig
    known = {name: kind for name, kind in typing.get_type_hints(config_class).items() if name not in _NOT_GIVEN}
    return _parse_fields("peft_config", text, config_class.__name__, known, sorted(known))


def _parse_fields(
    flag: str,
    text: str,
    owner: str,
    known: Mapping[str, Any],
    listed: list[str],
    aliases: Mapping[str, str] = types.MappingProxyType({}),
    is_word: Callable[[str, str], bool] = lambda name, raw: False,
) -> dict[str, Any]:
    """Parse the fields of `owner`; `known` has their types, `listed` are the names for a message."""
    values: dict[str, Any] = {}
    try:
        for name, raw in _pairs(text):
            target = aliases.get(name, name)
            if target not in known:
                hint = did_you_mean(name, [*known, *aliases])
                raise ValueError(f": {owner} has no field {name!r}.{hint} Its fields are {', '.join(listed)}.")
            if target in values:
                raise ValueError(f": {name} is given twice")
            is_value = not isinstance(raw, str) or is_word(target, raw)
            values[target] = raw if is_value else _parse_value(name, raw, known[target])
    except ValueError as error:  # these messages continue after the flag's name
        raise ValueError(f"--{flag}{error}") from error.__cause__
    return values


def _pairs(text: str) -> list[tuple[str, Any]]:
    if text.lstrip().startswith("{"):
        try:
            return list(json.loads(text).items())
        except (ValueError, RecursionError) as error:
            raise ValueError(f" starts like a JSON object but is none: {error}; got {text!r:.{_SHOWN}}") from error
    pairs = []
    for part in _split(text):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not name:
            raise ValueError(f" takes name=value pairs with commas between them; got {part!r:.{_SHOWN}}")
        pairs.append((name, value))
    return pairs


def _split(text: str) -> list[str]:
    """Split at commas outside quotes and brackets. A quote begins a value or an item; that in ``it's`` is a letter."""
    parts, start, before, quote = [], 0, ",", ""
    closing: list[str] = []
    for index, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"" and before in "=,:[{(":
            quote = character
        elif character in _CLOSING:
            closing.append(_CLOSING[character])
            if len(closing) > _DEEPEST:
                raise ValueError(f": brackets must not be nested this deeply; got {text!r:.{_SHOWN}}")
        elif closing and character == closing[-1]:
            closing.pop()
        elif character == "," and not closing:
            parts.append(text[start:index])
            start = index + 1
        before = before if character.isspace() else character
    if quote or closing:
        raise ValueError(f": {quote or closing[-1]!r} is missing in {text!r:.{_SHOWN}}")
    return [*parts, text[start:]]


def _takes_none_as_word(config_class: Any, name: str, text: str, annotation: Any) -> bool:
    """Whether ``none`` is a value of the field itself, and does not mean None."""
    if text.lower() != "none" or not {str, types.NoneType} <= set(_arms(annotation)):
        return False

    def accepts(value: str) -> bool:
        try:
            config_class(**{name: value})
        except Exception:
            return False
        return True

    return accepts(text) and not accepts(f"{text}?")


def _field_types(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """Return the fields of a configuration with their types: the annotation, or else the type of the default."""
    # not typing.get_type_hints: some annotations can only be resolved by type checkers
    hints = {field.name: field.type for field in dataclasses.fields(config_class) if not isinstance(field.type, str)}
    try:
        default = config_class()
    except Exception as error:  # architectures composed of others have no default
        raise ValueError(f"--model_type {config_class.model_type} cannot be built from scratch: {error}") from error
    return {
        name: hints.get(name, Any if value is None else type(value))
        for name, value in vars(default).items()
        if not name.startswith("_") and name != "transformers_version"
    }


def _arms(annotation: Any) -> list[Any]:
    """Return the alternatives of an annotation, with containers as their class: ``list[int] | None`` -> list, None."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return [arm for member in typing.get_args(annotation) for arm in _arms(member)]
    if origin is typing.Annotated:
        return _arms(typing.get_args(annotation)[0])
    if origin is typing.Literal:
        return [type(value) for value in typing.get_args(annotation)]
    return [origin or annotation]


def _parse_value(name: str, text: str, annotation: Any) -> Any:
    """Parse a value by its field's type."""
    arms = _arms(annotation)
    taken = _KINDS.intersection(arms) or _KINDS
    if text.lower() in ("none", "null") and types.NoneType in taken:
        return None
    is_tuple = text.startswith("(") and text.endswith(")") and "," in text
    if (text[:1] in ("[", "{") or is_tuple) and taken & _CONTAINERS:
        return _parse_container(name, text)
    for kind in (int, float):
        if kind in taken:
            try:
                return kind(text)
            except ValueError:
                continue
    if bool in taken and text.lower() in _BOOLEANS:
        return _BOOLEANS[text.lower()]
    if str in taken:
        quote = text[:1] if text[:1] in ("'", '"') else ""
        if quote and (len(text) < 2 or text[-1] != quote):
            raise ValueError(f": {quote!r} is missing in {text!r:.{_SHOWN}}")
        return text[1:-1] if quote else text
    allowed = " or ".join(dict.fromkeys("none" if arm is types.NoneType else arm.__name__ for arm in arms))
    raise ValueError(f": {name} takes {allowed}; got {text!r:.{_SHOWN}}")


def _parse_container(name: str, text: str) -> Any:
    """Parse a list or an object as JSON or as Python writes it, or a list of words without quotes; refuse a tuple."""
    for parse in (json.loads, ast.literal_eval):
        try:
            value = parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):  # the last two: nested too deeply
            continue
        if isinstance(value, list | dict):
            return value
    if text.startswith("[") and text.endswith("]"):
        items = [item.strip() for item in _split(text[1:-1].rstrip().removesuffix(","))]
        if all(items):
            return [_parse_value(name, item, Any) for item in items]
    raise ValueError(f": {name} takes a list such as [1,2] or a JSON object; got {text!r:.{_SHOWN}}")
