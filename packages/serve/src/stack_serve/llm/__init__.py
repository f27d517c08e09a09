"""The generation engine: a paged key-value cache, a scheduler on the host, compiled steps on the devices."""
