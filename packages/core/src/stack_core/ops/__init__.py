"""Ops used to build models; `implementation=` selects an implementation by name."""

from stack_core.ops.definitions.attention import PackedSegments as PackedSegments
from stack_core.ops.definitions.attention import attention as attention
from stack_core.ops.definitions.collective_matmul import collective_matmul as collective_matmul
from stack_core.ops.definitions.exchange import exchange as exchange
from stack_core.ops.definitions.exchange import received_sizes as received_sizes
from stack_core.ops.definitions.gated_linear_unit import gated_linear_unit as gated_linear_unit
from stack_core.ops.definitions.linear import linear as linear
from stack_core.ops.definitions.linear_attention import linear_attention as linear_attention
from stack_core.ops.definitions.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from stack_core.ops.definitions.low_rank import low_rank as low_rank
from stack_core.ops.definitions.norm import norm as norm
from stack_core.ops.definitions.paged_attention import paged_attention as paged_attention
from stack_core.ops.definitions.ragged_dot import ragged_dot as ragged_dot
from stack_core.ops.definitions.ring_attention import ring_attention as ring_attention
from stack_core.ops.definitions.rope import rope as rope
from stack_core.ops.definitions.state_space import state_space as state_space
from stack_core.ops.dispatch.choosing import for_export as for_export
from stack_core.ops.dispatch.chosen import changed_choices as changed_choices
from stack_core.ops.dispatch.chosen import choices as choices
from stack_core.ops.dispatch.explain import ExplainedCall as ExplainedCall
from stack_core.ops.dispatch.explain import Explanation as Explanation
from stack_core.ops.dispatch.explain import explain as explain
from stack_core.ops.dispatch.remat import decided_by_op as decided_by_op
from stack_core.ops.dispatch.remat import seen_into as seen_into
from stack_core.ops.dispatch.request import Implementation as Implementation
from stack_core.ops.dispatch.splitting import LogicalNames as LogicalNames
from stack_core.ops.dispatch.tuned import use_tuned_table as use_tuned_table
from stack_core.ops.head import Head as Head
from stack_core.ops.references.page_layout import page_layout as page_layout
from stack_core.ops.references.quantized import dequantize as dequantize
from stack_core.ops.references.rope_scaling import DynamicScaling as DynamicScaling
from stack_core.ops.references.rope_scaling import LinearScaling as LinearScaling
from stack_core.ops.references.rope_scaling import Llama3Scaling as Llama3Scaling
from stack_core.ops.references.rope_scaling import LongRopeScaling as LongRopeScaling
from stack_core.ops.references.rope_scaling import ProportionalScaling as ProportionalScaling
from stack_core.ops.references.rope_scaling import RopeScaling as RopeScaling
from stack_core.ops.references.rope_scaling import YarnScaling as YarnScaling

__all__ = [
    "DynamicScaling",
    "ExplainedCall",
    "Explanation",
    "Head",
    "Implementation",
    "LinearScaling",
    "Llama3Scaling",
    "LogicalNames",
    "LongRopeScaling",
    "PackedSegments",
    "ProportionalScaling",
    "RopeScaling",
    "YarnScaling",
    "attention",
    "changed_choices",
    "choices",
    "collective_matmul",
    "dequantize",
    "exchange",
    "explain",
    "for_export",
    "gated_linear_unit",
    "linear",
    "linear_attention",
    "linear_cross_entropy",
    "low_rank",
    "norm",
    "page_layout",
    "paged_attention",
    "ragged_dot",
    "received_sizes",
    "ring_attention",
    "rope",
    "seen_into",
    "state_space",
    "use_tuned_table",
]
