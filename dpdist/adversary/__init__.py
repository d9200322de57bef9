"""An adversary at single inputs: norm balls, ascents of a loss, the classifier they go through."""
