"""`python -m epilora.cli`."""

from epilora.cli import main

main()
