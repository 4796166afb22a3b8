"""`python -m spec_server`."""

import sys

from spec_server.cli import main

if __name__ == "__main__":
    sys.exit(main())
