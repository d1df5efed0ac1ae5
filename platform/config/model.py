"""Which model is trained."""

from pydantic import Field, model_validator

from headrace.platform.config.base import StrictModel


class TinyLlamaConfig(StrictModel):
    """A small Llama from random weights, for recipes that must run anywhere."""

    vocabulary: str = "lookup"
    """Its tokenizer: that of the environment of this name, `bytes` (one token a byte), or `trained`: byte-level BPE on
    the stages' chats."""
    vocabulary_size: int = Field(512, ge=300)
    """Entries of a `trained` vocabulary, at most."""
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
    """A Hugging Face folder, a GGUF file, or a tiny model made here."""

    path: str = ""
    """A folder with config.json, safetensors and a tokenizer."""
    gguf: str = ""
    """A GGUF file, unpacked once into fp32; `package:NAME` takes the one inside an installed Python package."""
    tiny_llama: TinyLlamaConfig | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> "ModelConfig":
        if [bool(self.path), bool(self.gguf), self.tiny_llama is not None].count(True) != 1:
            raise ValueError("give exactly one of model.path, model.gguf and model.tiny_llama")
        return self
