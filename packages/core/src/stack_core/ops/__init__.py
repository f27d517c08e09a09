"""The operations that models are made of; `implementation=` names one of those that plugins provide."""

from stack_core.ops._attention import attention as attention
from stack_core.ops._collective_matmul import collective_matmul as collective_matmul
from stack_core.ops._dispatch import Implementation as Implementation
from stack_core.ops._explain import ExplainedCall as ExplainedCall
from stack_core.ops._explain import Explanation as Explanation
from stack_core.ops._explain import explain as explain
from stack_core.ops._gated_linear_unit import gated_linear_unit as gated_linear_unit
from stack_core.ops._linear import linear as linear
from stack_core.ops._linear_attention import linear_attention as linear_attention
from stack_core.ops._linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from stack_core.ops._norm import norm as norm
from stack_core.ops._paged_attention import paged_attention as paged_attention
from stack_core.ops._quantized import dequantize as dequantize
from stack_core.ops._ragged_dot import ragged_dot as ragged_dot
from stack_core.ops._rope import rope as rope
from stack_core.ops._rope_scaling import DynamicScaling as DynamicScaling
from stack_core.ops._rope_scaling import LinearScaling as LinearScaling
from stack_core.ops._rope_scaling import Llama3Scaling as Llama3Scaling
from stack_core.ops._rope_scaling import LongRopeScaling as LongRopeScaling
from stack_core.ops._rope_scaling import RopeScaling as RopeScaling
from stack_core.ops._rope_scaling import YarnScaling as YarnScaling
from stack_core.ops._tuned import use_tuned_table as use_tuned_table

__all__ = [
    "DynamicScaling",
    "ExplainedCall",
    "Explanation",
    "Implementation",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "RopeScaling",
    "YarnScaling",
    "attention",
    "collective_matmul",
    "dequantize",
    "explain",
    "gated_linear_unit",
    "linear",
    "linear_attention",
    "linear_cross_entropy",
    "norm",
    "paged_attention",
    "ragged_dot",
    "rope",
    "use_tuned_table",
]
