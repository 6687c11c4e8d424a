"""`python -m suite` is the command `suite`."""

import sys

from suite.cli import main

sys.exit(main())
