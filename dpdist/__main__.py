"""`python -m dpdist`: the command line."""

from dpdist.commands.cli import main

main()
