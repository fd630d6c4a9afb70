"""Methods of single papers and toy environments. Modules in this package import only what user modules may import."""
