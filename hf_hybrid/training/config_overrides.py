"""``--config_overrides "hidden_size=64,layer_types=[a,b]"``: text to typed fields of a configuration.

``--peft_config`` is written, and read, in the same way.
"""

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

__all__ = ["parse_config_overrides", "parse_peft_config"]

_CLOSING = {"[": "]", "{": "}", "(": ")"}
_NOT_GIVEN = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version", "revision",
    "runtime_config", "task_type", "use_dora",
}  # fmt: skip
"""Fields of an adapter's configuration that other flags decide, or peft."""
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
    known = _field_types(config_class)
    if hasattr(config_class, "from_preset"):
        known["preset"] = str
    aliases: dict[str, str] = dict(config_class.attribute_map)
    own = sorted({*known, *aliases} - set(vars(PreTrainedConfig())))

    def is_word(name: str, raw: str) -> bool:
        return _is_choice(config_class, name, raw, known[name])

    return _parse_fields(
        text, known, flag="config_overrides", owner=config_class.__name__, own=own, aliases=aliases, is_word=is_word
    )


def parse_peft_config(text: str, method: str) -> dict[str, Any]:
    """Parse ``--peft_config`` by the types of the fields of peft's configuration.

    Args:
        text: As for `parse_config_overrides`.
        method: What ``--peft`` says.

    Raises:
        ValueError: A field is unknown or given twice, or a value is not of its type.
    """
    config_class: Any = IA3Config if method == "ia3" else LoraConfig
    known = {name: kind for name, kind in typing.get_type_hints(config_class).items() if name not in _NOT_GIVEN}
    return _parse_fields(text, known, flag="peft_config", owner=config_class.__name__, own=sorted(known), aliases={})


def _parse_fields(
    text: str,
    known: Mapping[str, Any],
    *,
    flag: str,
    owner: str,
    own: list[str],
    aliases: Mapping[str, str],
    is_word: Callable[[str, str], bool] = lambda name, raw: False,
) -> dict[str, Any]:
    """Parse ``name=value`` pairs, or a JSON object, by the types of the fields that there are.

    Args:
        text: As for `parse_config_overrides`.
        known: Every field, and its type.
        flag: What the text was given to, for messages.
        owner: What the fields belong to.
        own: The fields that a message lists where one is unknown.
        aliases: Other names of fields.
        is_word: Whether the text of a value is a word of the field where it looks like the absence of one.

    Raises:
        ValueError: A pair is not ``name=value``, a field is unknown or given twice, or a value is not of its type.
    """
    try:
        if text.lstrip().startswith("{"):
            pairs = _parse_json_object(text)
        else:
            pairs = [_split_pair(part) for part in _split_outside_brackets(text)]
        values: dict[str, Any] = {}
        for name, raw in pairs:
            target = aliases.get(name, name)
            if target not in known:
                hint = did_you_mean(name, [*known, *aliases])
                raise ValueError(f": {owner} has no field {name!r}.{hint} Its fields are {', '.join(own)}.")
            if target in values:
                raise ValueError(f": {name} is given twice")
            is_value = not isinstance(raw, str) or is_word(target, raw)
            values[target] = raw if is_value else _parse_value(name, raw, known[target])
    except ValueError as error:  # the messages below go on from the flag
        raise ValueError(f"--{flag}{error}") from error.__cause__
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
        raise ValueError(f" starts like a JSON object but is none: {error}; got {text!r:.{_SHOWN}}") from error
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
                raise ValueError(f": brackets must not be nested this deeply; got {text!r:.{_SHOWN}}")
        elif expected and character == expected[-1]:
            expected.pop()
        elif character == "," and not expected:
            parts.append(current)
            current = ""
            continue
        current += character
    if expected or quote:
        raise ValueError(f": {(quote or expected[-1])!r} is missing in {text!r}")
    parts.append(current)
    return parts


def _split_pair(part: str) -> tuple[str, str]:
    name, equals, value = part.partition("=")
    if not equals or not name.strip():
        raise ValueError(f" takes name=value pairs with commas between them; got {part!r}")
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
    raise ValueError(f": {name} takes {allowed}; got {text!r}")


def _parse_container(name: str, text: str) -> Any:
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):  # the last two: nested too deeply
            continue
    if text.startswith("["):  # words without quotes: [full_attention,sliding_attention]
        return [_parse_value(name, part.strip(), Any) for part in _split_outside_brackets(text[1:-1])]
    raise ValueError(f": {name} takes a list such as [1,2] or a JSON object; got {text!r}")
