"""`python -m weft`: the same as the `weft` command."""

from weft.cli.main import main

if __name__ == "__main__":
    main()
