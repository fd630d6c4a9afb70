"""Training methods of single papers, and toy environments. Modules of this package import only the parts of megatron_rl
that user-defined modules may import.
"""
