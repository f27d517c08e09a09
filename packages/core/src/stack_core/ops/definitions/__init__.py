"""The ops, a file each: the public function with its equation, and its reference."""
