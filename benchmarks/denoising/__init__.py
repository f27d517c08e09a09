"""Contenders of `diffusion_vs_peers`: programs that sample and train a denoiser, and print what a round took."""
