"""Private search: hyper-parameters chosen by private scores, with the choice in the guarantee."""

if __name__ != "dpdist.tuning":
    raise ImportError("this folder is the package dpdist.tuning: import it by that name")
