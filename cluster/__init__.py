"""Where work runs: knows Ray, knows nothing of privacy or robustness."""

if __name__ != "dpdist.cluster":
    raise ImportError("this folder is the package dpdist.cluster: import it by that name")
