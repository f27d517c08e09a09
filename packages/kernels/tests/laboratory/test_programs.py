"""What is read of compiled programs and of what compilers print."""

from stack_kernels.laboratory.programs import kernels_of, usage_of

TPU = """
  %splash_mha_fwd.3 = f32[8,16]{1,0} custom-call(%a), custom_call_target="tpu_custom_call", \
backend_config={"x":1,"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"32768"}]}
  ROOT %splash_mha_fwd.4.1 = f32[8,16]{1,0} custom-call(%b), custom_call_target="tpu_custom_call", \
backend_config={"x":1,"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"65536"}]}
  %pad = f32[8] custom-call(%c), custom_call_target="AllocateBuffer"
"""
GPU = """
  %fmha.1 = (bf16[1,8]{1,0}, u8[0]{0}) custom-call(%q, %k), custom_call_target="__cudnn$fmhaSoftmax", operand_layout={}
  %dot.7 = (f32[8,8]{1,0}, s8[4]{0}) custom-call(%x, %w), custom_call_target="__cublas$gemm"
  %pallas_call.1 = f32[64]{0} custom-call(%x.1), custom_call_target="mosaic_gpu_v2", api_version=API
"""
PTXAS = """
ptxas info    : Compiling entry function 'first' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 68 registers, used 2 barriers, 1 bytes smem
    24 bytes stack frame, 16 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 255 registers, used 2 barriers, 49160 bytes smem
"""


def test_kernels_of_a_tpu_have_their_names() -> None:
    assert kernels_of(TPU) == {"splash_mha_fwd": 2}


def test_kernels_of_a_gpu_have_the_names_of_their_targets_and_libraries_of_xla_are_none() -> None:
    assert kernels_of(GPU) == {"__cudnn$fmhaSoftmax:fmha": 1, "mosaic_gpu_v2:pallas_call": 1}


def test_the_largest_kernel_says_what_is_taken() -> None:
    of_tpu, of_gpu = usage_of(TPU, ""), usage_of(GPU, PTXAS)
    assert (of_tpu.vector_memory_bytes, of_tpu.registers) == (65_536, None)
    assert (of_gpu.registers, of_gpu.spilled_bytes, of_gpu.shared_bytes) == (255, 16, 49_160)
    assert of_gpu.vector_memory_bytes is None
