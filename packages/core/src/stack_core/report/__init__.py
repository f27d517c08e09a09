"""Pages of HTML that load nothing: markup, numbers with their units, plots, and the document around them."""
