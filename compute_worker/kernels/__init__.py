"""What a step computes on the GPU in Triton, each op beside its plain reference.

The expert layer, base GEMMs and per-token LoRA, starts at `moe.moe`. `decode_attention`, `dense_lora`, `rms_norm` and
`rotary` are one op each. Imports torch and triton only, nothing of epilora.
"""

from compute_worker.kernels.adapter_table import AdapterTable, LayerAdapter, ProjectionSlice
from compute_worker.kernels.config import GemmTile, MoEConfig, choose_config, token_bucket
from compute_worker.kernels.layout import Activation, MoEWeights
from compute_worker.kernels.moe import moe
from compute_worker.kernels.reference import moe_reference

__all__ = [
    "Activation",
    "AdapterTable",
    "GemmTile",
    "LayerAdapter",
    "MoEConfig",
    "MoEWeights",
    "ProjectionSlice",
    "choose_config",
    "moe",
    "moe_reference",
    "token_bucket",
]
