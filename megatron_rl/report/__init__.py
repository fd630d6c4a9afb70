"""Reads the files of runs and evaluations, and writes HTML pages, tables and images about them."""
