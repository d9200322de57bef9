"""`python -m dpdist`: the command line."""

from dpdist.cli import main

main()
