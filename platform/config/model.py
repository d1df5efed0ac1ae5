"""Which model is trained."""

from pydantic import Field, model_validator

from headrace.platform.config.base import StrictModel


class TinyLlamaConfig(StrictModel):
    """A small Llama from random weights, for recipes that must run anywhere. `vocabulary` names its word list."""

    vocabulary: str = "lookup"
    hidden: int = Field(96, ge=8)
    layers: int = Field(2, ge=1)
    heads: int = Field(3, ge=1)
    """`hidden / heads` is the head width; vLLM on a CPU needs at least 32."""
    intermediate: int = Field(256, ge=8)
    max_positions: int = Field(256, ge=16)

    @model_validator(mode="after")
    def _heads_divide(self) -> "TinyLlamaConfig":
        if self.hidden % self.heads or (self.hidden // self.heads) % 2:
            raise ValueError(f"hidden={self.hidden} must be a multiple of heads={self.heads} with an even head width")
        return self


class ModelConfig(StrictModel):
    """A Hugging Face folder, or a tiny model made here."""

    path: str = ""
    """A folder with config.json, safetensors and a tokenizer."""
    tiny_llama: TinyLlamaConfig | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> "ModelConfig":
        if bool(self.path) == (self.tiny_llama is not None):
            raise ValueError("give exactly one of model.path and model.tiny_llama")
        return self
