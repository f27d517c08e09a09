"""What the packages expect of each other's objects, by domain; a plugin implements these without importing anyone."""
