"""Model families: how a published layout (names, settings) maps to the one decoder. No maths lives here."""

from rlvr_jax.models.families.family import Family, Tensor
from rlvr_jax.models.families.gemma import GEMMA2, GEMMA3
from rlvr_jax.models.families.glm import DOTS1, GLM4_MOE
from rlvr_jax.models.families.llama import LLAMA
from rlvr_jax.models.families.mistral import MISTRAL, MIXTRAL
from rlvr_jax.models.families.olmo2 import OLMO2, OLMO3
from rlvr_jax.models.families.phi3 import PHI3
from rlvr_jax.models.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from rlvr_jax.models.families.smollm3 import SMOLLM3

# By ``model_type`` of config.json, which GGUF calls ``general.architecture``.
FAMILIES = {
    family.model_type: family
    for family in (
        *(LLAMA, SMOLLM3, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, GEMMA2, GEMMA3),
        *(MISTRAL, MIXTRAL, OLMO2, OLMO3, PHI3, GLM4_MOE, DOTS1),
    )
}

__all__ = ["FAMILIES", "Family", "Tensor"]
