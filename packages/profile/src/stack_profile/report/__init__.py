"""A trace as one HTML page that loads nothing."""
