"""Private search: hyper-parameters chosen by private scores, with the choice in the guarantee."""
