"""Quantizes a GGUF file by llama.cpp's own rounding, without an importance matrix; runs in its own environment.

python llama_cpp_quantize.py MODEL.gguf QUANTIZED.gguf Q4_K_M
"""

import argparse

import llama_cpp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source")
    parser.add_argument("destination")
    parser.add_argument("type", help="a type of llama.cpp, such as Q4_K_M or Q8_0")
    options = parser.parse_args()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{options.type}")
    params.nthread = 1
    llama_cpp.llama_backend_init()
    if llama_cpp.llama_model_quantize(options.source.encode(), options.destination.encode(), params):
        raise RuntimeError("llama_model_quantize failed")


if __name__ == "__main__":
    main()
