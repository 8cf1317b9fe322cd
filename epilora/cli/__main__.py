"""`python -m epilora.cli`."""

from epilora.cli.app import main

main()
