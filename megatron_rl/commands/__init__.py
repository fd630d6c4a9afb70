"""Holds the command line: the parser, and for each command a module that reads its arguments and calls the parts."""
