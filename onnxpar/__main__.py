"""`python -m onnxpar`."""

import sys

from onnxpar.cli import main

sys.exit(main())
