"""Self-contained HTML pages: markup, number formatting, plots, and the document."""
