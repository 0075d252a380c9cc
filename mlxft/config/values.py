"""One key at a time: its type, its range, its choices; every value comes out in one settled form."""

from typing import Any

from mlxft.config.convert import converted
from mlxft.config.keys import Key
from mlxft.config.rules import RULES, Range


def settle(key: Key, value: Any) -> Any:
    """Returns `value` as the key's type, within its range, or raises ValueError with what is wrong.

    "3", 3.0 and 3 are all the number 3 to a key that counts; a path may be a `pathlib.Path`.
    """
    if value is None and key.hint is Any and key.default is not None:
        raise ValueError("null is not a value for it")
    rule = RULES.get(key.rule or key.name)
    try:
        value = converted(key.hint, value)
    except ValueError as error:
        range_ = f"; it must be {rule.bounds}" if isinstance(rule, Range) and value is not None else ""
        raise ValueError(f"{error}{range_}") from None
    return rule(value) if rule and value is not None else value
