"""The command line `onnxpar`: its parsers and its commands."""

from onnxpar.cli.command_line import main as main
