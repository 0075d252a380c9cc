"""A value as the type its key has: "3", 3.0 and 3 are all the number 3 to a key that counts."""

import math
import os
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from types import NoneType
from typing import Any, get_args, get_origin

_SMALLEST = 2.0**-126  # float32's, but for numbers with fewer bits


def converted(hint: Any, value: Any) -> Any:
    """Returns a value as a type hint says. Raises: ValueError with what is wrong, as all below."""
    arguments = get_args(hint)
    if NoneType in arguments:
        return None if value is None else converted(arguments[0], value)
    if hint is Any:
        return value
    if value is None:
        raise ValueError("null is not a value for it")
    if get_origin(hint) is list:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ValueError(f"{shown(value)} is not a list; write [a,b]")
        return [converted(arguments[0], item) for item in value]
    if get_origin(hint) is dict:
        if not isinstance(value, Mapping):
            raise ValueError(f"{shown(value)} is not a dictionary; write {{ours:theirs}}")
        return {text_of(name): converted(arguments[1], item) for name, item in value.items()}
    return {str: text_of, bool: truth_of, int: whole_of, float: number_of}[hint](value)


def shown(value: Any) -> str:
    """Returns a value as YAML would have it, for messages."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)


def text_of(value: Any) -> str:
    """Returns a text; whole numbers and paths are taken for one."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, str):
        return value
    if isinstance(value, Integral) and not isinstance(value, bool):
        return str(value)
    raise ValueError(f"{shown(value)} is not a text; if it is meant as one, put it in quotes")


def truth_of(value: Any) -> bool:
    """Returns true or false, also where it is spelled out."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ValueError(f"{shown(value)} is neither true nor false")


def whole_of(value: Any) -> int:
    """Returns a whole number that 64 bits can hold."""
    try:
        number = number_of(value)
    except ValueError:
        number = math.nan
    if not number.is_integer():
        raise ValueError(f"{shown(value)} is not a whole number")
    if abs(number) >= 2**63:  # arrays' sizes and places have 64 bits
        raise ValueError(f"{shown(value)} is out of range; whole numbers end at 2^63 here")
    return int(value) if isinstance(value, Integral) else int(number)


def number_of(value: Any) -> float:
    """Returns a finite number that float32 does not round to 0."""
    try:
        if isinstance(value, bool) or not isinstance(value, Real | str):
            raise ValueError
        number = float(value)
    except (ValueError, OverflowError):
        raise ValueError(f"{shown(value)} is not a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{shown(value)} is not a finite number")
    if 0 < abs(number) < _SMALLEST:
        raise ValueError(f"{shown(value)} is 0 in the 32 bits that numbers have in training")
    return number
