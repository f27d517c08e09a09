"""Diffusion and flow models: denoisers, their objectives, and the samplers that make images with them."""
