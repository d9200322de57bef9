"""Epsilons of PATE that depend on the votes, as its papers print them."""
