"""`python -m onnxpar`."""

import sys

from onnxpar.cli.command_line import main

sys.exit(main())
