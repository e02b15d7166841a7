"""`python -m dcptool` is the `dcptool` command."""

from dcptool.cli import main

if __name__ == "__main__":
    main(prog_name="dcptool")
