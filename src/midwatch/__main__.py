"""``python -m midwatch``: the command line where its script is not on the PATH."""

from midwatch.cli.main import main

main()
