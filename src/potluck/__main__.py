"""`python -m potluck`: the same as the `potluck` command."""

from potluck.cli.main import main

main()
