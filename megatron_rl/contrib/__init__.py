"""Methods of single papers and toy environments. A module here imports only what a module of a user may import."""
