"""Reads what runs and evaluations have left and writes pages, tables and pictures about them."""
