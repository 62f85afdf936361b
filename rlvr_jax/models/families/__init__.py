"""Model families: how a published layout (names, settings) maps to the one decoder. No maths lives here."""

from rlvr_jax.models.families.family import Family, Tensor
from rlvr_jax.models.families.llama import LLAMA

# By ``model_type`` of config.json, which GGUF calls ``general.architecture``.
FAMILIES = {LLAMA.model_type: LLAMA}

__all__ = ["FAMILIES", "Family", "Tensor"]
