"""What changed between captures, and whether it may."""
