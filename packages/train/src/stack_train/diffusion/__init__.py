"""Diffusion and flow models: denoisers, their objectives, and samplers of images."""
