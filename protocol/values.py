"""How the values are declared of which a log has hundreds of thousands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(cls: type[T]) -> type[T]:
    """Class decorator: a frozen dataclass with slots, that is compared and hashed by its fields.

    That nothing is assigned to the fields afterwards is checked by the type checker alone. A guard at run time would
    make each object several times as expensive: it is ``object.__setattr__`` that fills such a one, field by field.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)
