"""`python -m gateway.cli`: the command `tierline` where the console script is not on the path."""

from gateway.cli import main

main()
