"""``python -m ftckpt``."""

from ftckpt.cli import main

if __name__ == "__main__":
    main()
