"""Starting, stopping, watching and writing captures."""
