"""The command line: the argument parser, and one module for each command."""
