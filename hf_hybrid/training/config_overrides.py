"""``--config_overrides "hidden_size=64,layer_types=[a,b]"``: text to typed fields of a configuration."""

import ast
import dataclasses
import json
import types
import typing
from typing import Any

from transformers import PreTrainedConfig

from hf_hybrid.suggestions import did_you_mean

__all__ = ["parse_config_overrides"]

_CLOSING = {"[": "]", "{": "}", "(": ")"}
_DEEPEST = 20  # no field holds lists of lists of lists
_SHOWN = 200  # characters of a text that are shown in an error
_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def parse_config_overrides(text: str, config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """Parse overrides by the types of a configuration's fields.

    Args:
        text: ``name=value`` pairs with commas between them; a comma inside brackets or quotes does not split. Or a
            JSON object. The value of a field that takes None may be ``none``, unless that is one of its own words.
        config_class: The configuration class; its names for a field (``hidden_size`` of T5) are accepted too.

    Returns:
        The values by field name; under ``preset``, where the class has a ``from_preset``, the name of a preset.

    Raises:
        ValueError: A pair is not ``name=value``, a field is unknown or given twice, or a value is not of its type.
    """
    if text.lstrip().startswith("{"):
        pairs = _parse_json_object(text)
    else:
        pairs = [_split_pair(part) for part in _split_outside_brackets(text)]
    known = _field_types(config_class)
    if hasattr(config_class, "from_preset"):
        known["preset"] = str
    aliases: dict[str, str] = dict(config_class.attribute_map)
    values: dict[str, Any] = {}
    for name, raw in pairs:
        target = aliases.get(name, name)
        if target not in known:
            own = sorted({*known, *aliases} - set(vars(PreTrainedConfig())))
            raise ValueError(
                f"--config_overrides: {config_class.__name__} has no field {name!r}."
                f"{did_you_mean(name, [*known, *aliases])} Its fields are {', '.join(own)}."
            )
        if target in values:
            raise ValueError(f"--config_overrides: {name} is given twice")
        is_word = isinstance(raw, str) and _is_choice(config_class, target, raw, known[target])
        values[target] = raw if is_word or not isinstance(raw, str) else _parse_value(name, raw, known[target])
    return values


def _is_choice(config_class: Any, name: str, text: str, annotation: Any) -> bool:
    """Whether ``none`` is one of the words that a field takes, and not the absence of a value."""
    if text.lower() != "none" or not {str, types.NoneType} <= set(_arms(annotation)):
        return False

    def accepts(value: str) -> bool:
        try:
            config_class(**{name: value})
        except Exception:
            return False
        return True

    return accepts(text) and not accepts(f"{text}?")


def _parse_json_object(text: str) -> list[tuple[str, Any]]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"--config_overrides starts like a JSON object but is none: {error}; got {text!r:.{_SHOWN}}"
        ) from error
    return list(value.items())


def _split_outside_brackets(text: str) -> list[str]:
    parts, current, expected, quote = [], "", [], ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in _CLOSING:
            expected.append(_CLOSING[character])
            if len(expected) > _DEEPEST:
                raise ValueError(
                    f"--config_overrides: brackets must not be nested this deeply; got {text!r:.{_SHOWN}}"
                )
        elif expected and character == expected[-1]:
            expected.pop()
        elif character == "," and not expected:
            parts.append(current)
            current = ""
            continue
        current += character
    if expected or quote:
        raise ValueError(f"--config_overrides: {(quote or expected[-1])!r} is missing in {text!r}")
    parts.append(current)
    return parts


def _split_pair(part: str) -> tuple[str, str]:
    name, equals, value = part.partition("=")
    if not equals or not name.strip():
        raise ValueError(f"--config_overrides takes name=value pairs with commas between them; got {part!r}")
    return name.strip(), value.strip()


def _field_types(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """The fields of a configuration with their types: the annotation, or else the type of the default."""
    fields: dict[str, Any] = {}
    # not typing.get_type_hints: some configurations name types that only type checkers can resolve
    hints = {field.name: field.type for field in dataclasses.fields(config_class) if not isinstance(field.type, str)}
    try:
        default = config_class()
    except Exception as error:  # architectures that are put together from others have no default
        raise ValueError(f"--model_type {config_class.model_type} cannot be built from scratch: {error}") from error
    for name, value in vars(default).items():
        if not name.startswith("_") and name != "transformers_version":
            fields[name] = hints.get(name, Any if value is None else type(value))
    return fields


def _arms(annotation: Any) -> list[Any]:
    """The alternatives of an annotation, containers reduced to their class: ``list[int] | None`` -> list, None."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return [arm for member in typing.get_args(annotation) for arm in _arms(member)]
    if origin is typing.Annotated:
        return _arms(typing.get_args(annotation)[0])
    if origin is typing.Literal:
        return [type(value) for value in typing.get_args(annotation)]
    return [origin or annotation]


def _parse_value(name: str, text: str, annotation: Any) -> Any:
    arms = _arms(annotation)
    anything = not any(arm in (bool, int, float, str, list, tuple, dict, types.NoneType) for arm in arms)
    if text.lower() in ("none", "null") and (anything or types.NoneType in arms):
        return None
    if text[:1] in _CLOSING and (anything or any(arm in (list, tuple, dict) for arm in arms)):
        return _parse_container(name, text)
    for kind in (int, float):
        if kind in arms or anything:
            try:
                return kind(text)
            except ValueError:
                continue
    if (bool in arms or anything) and text.lower() in _BOOLEANS:
        return _BOOLEANS[text.lower()]
    if str in arms or anything:
        return text[1:-1] if len(text) > 1 and text[0] in "'\"" and text[-1] == text[0] else text
    allowed = " or ".join(dict.fromkeys("none" if arm is types.NoneType else arm.__name__ for arm in arms))
    raise ValueError(f"--config_overrides: {name} takes {allowed}; got {text!r}")


def _parse_container(name: str, text: str) -> Any:
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):  # the last two: nested too deeply
            continue
    if text.startswith("["):  # words without quotes: [full_attention,sliding_attention]
        return [_parse_value(name, part.strip(), Any) for part in _split_outside_brackets(text[1:-1])]
    raise ValueError(f"--config_overrides: {name} takes a list such as [1,2] or a JSON object; got {text!r}")
