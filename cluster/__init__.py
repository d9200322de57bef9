"""Run work in this process or on Ray; nothing here depends on privacy or robustness."""

if __name__ != "dpdist.cluster":
    raise ImportError("this folder is the package dpdist.cluster: import it by that name")
