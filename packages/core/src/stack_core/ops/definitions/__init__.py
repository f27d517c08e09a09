"""The ops, one file each: the public function with its equation, and its reference."""
