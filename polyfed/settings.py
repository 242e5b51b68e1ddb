"""The base of all groups of settings: unknown names, infinite numbers and booleans in place of numbers are refused."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Settings(BaseModel):
    """Settings that are checked when they are made and never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Pydantic reads true as 1, so `rounds: true` or `rounds: yes` in YAML would be one round."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        types = {annotation, *get_args(annotation)}
        if isinstance(value, bool) and types & {int, float} and bool not in types:
            raise ValueError("must be a number")
        return value
