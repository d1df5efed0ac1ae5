"""What every part of a configuration shares: strict, frozen, and helpful about typing errors."""

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """A configuration part. Unknown keys are errors (case V3); `load.py` names the nearest known one."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
