"""`python -m fsd`."""

from __future__ import annotations

import sys

from fsd.cli.start import main

if __name__ == "__main__":
    sys.exit(main())
