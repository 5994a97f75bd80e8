"""The command line."""

from onnxpar.cli.command_line import main as main
